import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.models.registry.registry import ModelVersion
from datasvc.models.registry.retention import RetentionPolicy, plan_retention


def version(number, *, step=None, tags=(), removed=False, **metrics):
    return ModelVersion(
        "m", number, tags, {"step": number * 100 if step is None else step, "metrics": metrics}, removed
    )


versions = st.lists(
    st.builds(
        lambda step, tags, removed, metrics: (step, tags, removed, metrics),
        st.integers(0, 3000),
        st.sampled_from([(), (), (), ("prod",), ("a", "b")]),
        st.booleans(),
        st.dictionaries(st.sampled_from(["acc", "loss"]), st.floats(0, 1) | st.just(math.nan) | st.just("nan")),
    ),
    max_size=12,
).map(lambda given: [version(n, step=s, tags=t, removed=r, **m) for n, (s, t, r, m) in enumerate(given, 1)])
counts = st.none() | st.integers(1, 5)


@given(versions, st.integers(1, 4), counts, counts, st.sampled_from([None, "acc"]), st.sampled_from(["max", "min"]))
def test_the_newest_the_best_and_the_tagged_stay_whatever_the_policy(versions, last, every, steps, metric, mode):
    living = [each for each in versions if not each.removed]
    given_scores = {each.version: each.entry["metrics"].get("acc") for each in living}
    scores = {n: value for n, value in given_scores.items() if isinstance(value, float) and not math.isnan(value)}
    if metric and living and not scores:
        with pytest.raises(ConfigError, match="no version has a finite metric 'acc'"):
            plan_retention(versions, RetentionPolicy(last=last, metric=metric))
        return
    plan = plan_retention(versions, RetentionPolicy(last, None, metric, metric and mode, every, steps))
    assert sorted([*plan.kept, *plan.removed]) == [each.version for each in living]
    assert all(plan.kept.values())
    must = {each.version for each in living[-last:]} | {each.version for each in living if each.tags}
    if scores:
        ends = [max, min] if metric is None else [max if mode == "max" else min]
        best_values = {end(scores.values()) for end in ends}
        assert all(any(scores.get(number) == value for number in plan.kept) for value in best_values)
    assert must <= set(plan.kept)
    if every:
        assert {each.version for each in living if each.version % every == 0} <= set(plan.kept)
    if steps:
        spans = {each.entry["step"] // steps for each in living}
        assert spans == {each.entry["step"] // steps for each in living if each.version in plan.kept}


def test_every_version_that_stays_says_why():
    given_ = [
        version(1, acc=0.9),
        version(2, acc=0.5),
        version(3, acc=0.95, tags=("prod",)),
        version(4, acc=math.nan),
        version(5, acc=0.1),
        version(6),
    ]
    plan = plan_retention(given_, RetentionPolicy(last=1, best=2, metric="acc", every_steps=250))
    assert plan.kept == {
        1: ("highest acc, place 2", "every 250 steps"),
        3: ("tagged prod", "highest acc", "every 250 steps"),
        5: ("every 250 steps",),
        6: ("newest", "last 1"),
    }
    assert plan.removed == (2, 4)


def test_without_a_metric_nobody_knows_which_end_is_best_so_both_stay():
    given_ = [version(1, loss=3.0), version(2, loss=1.0), version(3, loss=2.0), version(4)]
    plan = plan_retention(given_, RetentionPolicy(last=1))
    assert plan.kept == {1: ("highest loss",), 2: ("lowest loss",), 4: ("newest", "last 1")}


@pytest.mark.parametrize(("metric", "kept"), [("loss", 2), ("val/loss", 2), ("top1", 1), ("eval.error_rate", 2)])
def test_the_best_is_the_lowest_of_a_loss_and_the_highest_of_an_accuracy(metric, kept):
    given_ = [version(1, **{metric: 3.0}), version(2, **{metric: 1.0}), version(3, **{metric: 2.0}), version(4)]
    assert list(plan_retention(given_, RetentionPolicy(best=1, metric=metric)).kept) == [kept, 4]
    for mode, number in (("max", 1), ("min", 2)):
        assert list(plan_retention(given_, RetentionPolicy(best=1, metric=metric, mode=mode)).kept) == [number, 4]


def test_of_equally_good_ones_the_newest_is_the_best():
    given_ = [version(1, acc=0.5), version(2, acc=0.5), version(3)]
    assert 1 in plan_retention(given_, RetentionPolicy(last=1, metric="acc")).removed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "the retention policy keeps nothing"),
        ({"metric": "acc"}, "the retention policy keeps nothing"),
        ({"last": 0}, "must be 1 or more"),
        ({"best": 3}, "names no metric; give one"),
        ({"last": 1, "metric": "acc", "mode": "best"}, "'max' or 'min'"),
        ({"best": 1, "metric": "score"}, "'score' does not show.*--mode max or --mode min"),
        ({"last": 1, "mode": "min"}, "is given without a metric"),
    ],
)
def test_a_policy_that_says_too_little_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RetentionPolicy(**settings)


def test_a_metric_that_no_version_has_is_refused_and_those_there_are_named():
    with pytest.raises(ConfigError, match=r"no version has a finite metric 'top1'.*there are: acc"):
        plan_retention([version(1, acc=0.5)], RetentionPolicy(best=1, metric="top1"))
