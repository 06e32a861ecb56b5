"""Mixtures whose weights change: passes that go on over a change, resumes at any size, and what may be changed."""

import itertools
import json
import pickle
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache import Cache
from datasvc.errors import CacheFullError, ConfigError, StateMismatchError
from datasvc.ledger.audit import audit_folders
from datasvc.loaders import Mixture, MixtureStage
from datasvc.loaders.core.mixture import clock_steps, most_of
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from tests.examples import examples
from tests.loaders.numbered import Numbers, make_splits, write_split


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return make_splits(tmp_path_factory.mktemp("stages"))


def staged(splits, stages, weights=(5, 3, 2), **options):
    """Return a mixture whose stages are (start, weights[, ramp])."""
    parts = list(splits.values())
    later = [MixtureStage(start, dict(zip(parts, each, strict=True)), *ramp) for start, each, *ramp in stages]
    return Mixture(
        list(zip(parts, weights, strict=True)), stages=later, **{"block": 10, "epoch_samples": 37, **options}
    )


def line_of(mixture, count, *, batch_size=6, **options):
    """Return split, number and step of the first samples of one process without a break."""
    line = []
    with Numbers(mixture, batch_size, **options) as loader:
        while len(line) < count:
            for batch, numbers in loader:
                line += zip(batch.sources.tolist(), numbers, strict=True)
    return line[:count]


CHANGES = [(100, (1, 1, 0)), (155, (0, 1, 1)), (290, (2, 0, 2), True), (400, (1, 4, 5))]


def test_over_changes_each_pass_serves_every_sample_once_and_none_is_lost_or_repeated(splits):
    """As users of Megatron-LM ask for, who restart their data sets at a change (NVIDIA/Megatron-LM#457)."""
    line = line_of(staged(splits, CHANGES), 1200)
    for source, split in enumerate(splits.values()):
        own = [number for each, number in line if each == source]
        whole = sorted(sample["label"] for sample in split)
        passes = [own[start : start + len(split)] for start in range(0, len(own), len(split))]
        assert len(passes) > 5
        assert all(sorted(each) == whole for each in passes[:-1])
        assert len(set(passes[-1])) == len(passes[-1])
        assert set(passes[-1]) <= set(whole)


def test_weights_hold_from_the_block_in_which_a_stage_starts(splits):
    line = line_of(staged(splits, CHANGES), 500)
    counts = [Counter(source for source, _ in line[start : start + 10]) for start in range(0, 500, 10)]
    assert counts[:10] == [{0: 5, 1: 3, 2: 2}] * 10
    assert counts[10:16] == [{0: 5, 1: 5}] * 6  # the stage from 155 begins with the next block, at 160
    assert all(each[0] >= 1 and each[2] >= 1 for each in counts[16:29])  # data set 0 comes back with the ramp
    assert sum(each[1] for each in counts[16:29]) == pytest.approx(13 * (10 - 2) / 4, abs=10)
    assert counts[29][1] == 0
    assert all(abs(each[2] - 5) <= 1 for each in counts[40:])


def follow(mixtures, runs, *, order):
    """Return samples by their place on the line, of runs that are killed and resumed at other sizes and mixtures."""
    served, state = {}, None
    for mixture, (steps, world_size, batch_size) in zip(mixtures, runs, strict=True):
        states = []
        for rank in range(world_size):
            with Numbers(mixture, batch_size, rank=rank, world_size=world_size, order=order) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for _ in range(steps):
                    batch, numbers = next(iter(loader), None) or next(iter(loader))
                    places = (batch.epoch * len(mixture) + batch.positions).tolist()
                    for place, source, number, counts in zip(
                        places, batch.sources.tolist(), numbers, batch.mask, strict=True
                    ):
                        if counts:
                            assert place not in served
                            served[place] = source, number
                states.append(json.loads(json.dumps(loader.state_dict())))
        assert all(each == states[0] for each in states)
        state = states[0]
    return served, state


RUNS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 5]), st.integers(1, 6)), min_size=2, max_size=5
)
ORDERS = st.sampled_from([OrderConfig(seed=3), OrderConfig(shuffle="windowed", lanes=2, block=4, sticky=True)])


@pytest.mark.slow
@examples(25)
@given(runs=RUNS, order=ORDERS, shift=st.integers(0, 60))
def test_killed_and_resumed_at_other_sizes_over_changes_the_samples_are_those_of_one_run(splits, runs, order, shift):
    mixture = staged(splits, [(start // 4 + shift, *rest) for start, *rest in CHANGES])
    served, _ = follow([mixture] * len(runs), runs, order=order)
    line = line_of(mixture, len(served), order=order)
    assert served == dict(enumerate(line))


@pytest.mark.slow
@examples(25)
@given(runs=RUNS, order=ORDERS, at=st.integers(1, 4), ahead=st.integers(0, 20))
def test_a_resume_with_other_stages_ahead_goes_on_as_if_they_had_been_planned_from_the_start(
    splits, runs, order, at, ahead
):
    at = min(at, len(runs) - 1)
    plain = Mixture(list(zip(splits.values(), (5, 3, 2), strict=True)), block=10, epoch_samples=37)
    _, state = follow([plain] * at, runs[:at], order=order)
    free = -(-(state["epoch"] * 37 + state["position"]) // 10) * 10
    changed = staged(splits, [(free + ahead, (0, 1, 1)), (free + ahead + 70, (1, 0, 1), True)])
    served, _ = follow([plain] * at + [changed] * (len(runs) - at), runs, order=order)
    assert served == dict(enumerate(line_of(changed, len(served), order=order)))


def state_at(mixture, num_steps):
    with Numbers(mixture, 5) as loader:
        for _ in range(num_steps):
            next(iter(loader), None) or next(iter(loader))
        return json.loads(json.dumps(loader.state_dict()))


def test_what_lies_behind_a_state_may_not_be_changed_and_the_message_says_from_where(splits):
    state = state_at(staged(splits, CHANGES), 24)  # 3 epochs of 8 steps: sample 111, in the block from 110 on
    assert (state["mixture_format"], state["epoch"], state["position"]) == (2, 2, 37)
    allowed = [
        staged(splits, CHANGES[:1]),  # the stages that have not begun are withdrawn
        staged(splits, [*CHANGES[:1], (120, (0, 0, 1))]),
        staged(splits, [(95, (1, 1, 0)), *CHANGES[1:]]),  # starts in the same block
    ]
    for mixture in allowed:
        with Numbers(mixture, 5) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == {**state, "mixture": mixture.describe()}
    refused = {
        r"saved with the weights big@1/train 1, middle@1/train 1 from sample 100 on; this mixture has no further "
        r"stage. The first 120 samples cannot be changed: .* differ only after 120 samples": staged(splits, []),
        r"has the weights big@1/train 1, middle@1/train 1 from sample 90 on": staged(splits, [(90, (1, 1, 0))]),
        r"big@1/train 5, .* from sample 0 on; .* big@1/train 4": staged(splits, CHANGES, weights=(4, 3, 2)),
        "no further stage; this mixture has the weights tiny@1/train 1 from sample 110 on": staged(
            splits, [*CHANGES[:1], (110, (0, 0, 1))]
        ),
        "and a ramp to big@1/train 2, .* at sample 100": staged(splits, [(100, (2, 1, 0), True)]),
        "mixture.block=10, this loader has mixture.block=20": staged(splits, CHANGES, block=20),
    }  # fmt: skip
    for message, mixture in refused.items():
        with Numbers(mixture, 5) as loader, pytest.raises(StateMismatchError, match=message):
            loader.load_state_dict(state)
    damaged = {
        **state,
        "mixture": {**state["mixture"], "stages": [{"start": 7, "weights": [1, 1, 1], "ramp": False}]},
    }
    with Numbers(allowed[0], 5) as loader, pytest.raises(ConfigError, match="stages are not valid"):
        loader.load_state_dict(damaged)


def test_a_ramp_that_has_begun_is_finished(splits):
    ramp = [(200, (1, 1, 1), True)]
    state = state_at(staged(splits, ramp), 2)
    with Numbers(staged(splits, [*ramp, (210, (0, 0, 1))]), 5) as loader:
        loader.load_state_dict(state)
    with Numbers(staged(splits, []), 5) as loader, pytest.raises(StateMismatchError, match="differ only after 200"):
        loader.load_state_dict(state)


def test_states_of_constant_weights_keep_their_format_and_go_into_stages_and_back(splits):
    plain = Mixture(list(zip(splits.values(), (5, 3, 2), strict=True)), block=10, epoch_samples=37)
    state = state_at(plain, 3)
    assert state["mixture_format"] == 1
    assert "stages" not in state["mixture"]
    with Numbers(staged(splits, [(20, (0, 0, 1))]), 5) as loader:
        loader.load_state_dict(state)
        back = loader.state_dict()
    with Numbers(plain, 5) as loader:
        loader.load_state_dict(back)
        assert loader.state_dict() == state
    other = Mixture(list(zip(splits.values(), (5, 3, 1), strict=True)), block=10, epoch_samples=37)
    with Numbers(other, 5) as loader, pytest.raises(StateMismatchError, match="from here on, give Mixture stages"):
        loader.load_state_dict(state)


def test_a_data_set_may_join_a_run_and_may_leave_again_before_it_is_served(splits):
    first, new, last = splits.values()
    options = {"block": 10, "epoch_samples": 40}
    before = Mixture({first: 3, last: 2}, **options)
    after = Mixture({first: 3, new: 0, last: 2}, stages=[MixtureStage(20, {new: 1, first: 1})], **options)
    state = state_at(before, 4)
    with Numbers(after, 5) as loader:
        loader.load_state_dict(state)
        found = [sample for batch, numbers in loader for sample in zip(batch.sources.tolist(), numbers, strict=True)]
    assert Counter(source for source, _ in found) == {0: 10, 1: 10}
    assert {number for source, number in found if source == 1} <= set(range(200, 212))
    planned = {**state, "mixture": after.describe(), "mixture_format": 2}
    with Numbers(before, 5) as loader:
        loader.load_state_dict(planned)
        assert loader.state_dict() == state
    with Numbers(before, 5) as loader, pytest.raises(StateMismatchError, match="middle@1/train 1 from sample 20 on"):
        loader.load_state_dict({**planned, "position": 21})


def test_the_classes_of_later_stages_come_last_so_that_labels_keep_their_numbers(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    first, new, last = (
        write_split(repository, name, [2], 0, classes=(f"{name}0", f"{name}1", "all")) for name in ("a", "b", "c")
    )
    before = Mixture({first: 1, last: 1})
    after = Mixture({first: 1, new: 0, last: 1}, stages=[MixtureStage(4096, {new: 1})])
    assert before.classes == ("a0", "a1", "all", "c0", "c1")
    assert after.classes == (*before.classes, "b0", "b1")


def test_a_mixture_in_a_mixture_multiplies_weights(splits):
    big, middle, tiny = splits.values()
    inner = Mixture({big: 0.75, tiny: 0.25}, epoch_samples=5, block=7)
    outer = Mixture(
        {middle: 1, inner: 2},
        block=12,
        stages=[MixtureStage(24, {inner: 1}), MixtureStage(48, {middle: 1, inner: 1})],
    )
    assert outer.splits == (middle, big, tiny)
    assert outer.weights == (2, 3, 1)
    assert [stage.weights for stage in outer.stages] == [(0, 3, 1), (4, 3, 1)]
    assert Mixture({Mixture({outer.splits[0]: 1}): Fraction(1, 3), big: 1}, block=9).weights == (1, 3)
    with pytest.raises(ConfigError, match="give the stages to the outer mixture"):
        Mixture({outer: 1})
    with pytest.raises(ConfigError, match="big@1/train has the same samples as big@1/train; keep one"):
        Mixture({inner: 1, big: 1})


def test_stages_that_mean_nothing_are_refused_and_the_message_says_why(splits, tmp_path):
    big, middle, tiny = splits.values()
    parts, options = {big: 1, middle: 1}, {"block": 10}
    empty = write_split(Repository.create(str(tmp_path / "repo")), "none", [], 0)
    cases = [
        ([MixtureStage(30, {tiny: 1})], r"from sample 30 gives a weight to Split\(tiny@1/train.*with the weight 0"),
        ([MixtureStage(0, {big: 1})], "from sample 0 starts in block 0, expected a block after 0"),
        (
            [MixtureStage(11, {big: 1}), MixtureStage(19, {middle: 1})],
            "from sample 19 starts in block 2.* at least a block of 10",
        ),
        (
            [MixtureStage(30, {big: 1}), MixtureStage(20, {middle: 1})],
            "from sample 20 starts in block 2, expected a block after 3",
        ),
        ([MixtureStage(30, {big: 0})], "each of its stages, needs at least one split with a weight above 0"),
        ([MixtureStage(30, {})], "each of its stages, needs at least one split"),
        ([MixtureStage(30, {big: -1})], "weight of big@1/train is -1"),
        (
            [MixtureStage(30, {big: 99, middle: 1})],
            "weight of middle@1/train gives less than one sample in a block of 10",
        ),
    ]
    for stages, message in cases:
        with pytest.raises(ConfigError, match=message):
            Mixture(parts, stages=stages, **options)
    with pytest.raises(ConfigError, match="none@1/train has a weight and no samples"):
        Mixture({big: 1, empty: 0}, stages=[MixtureStage(50, {empty: 1})])
    Mixture({big: 1, empty: 0}, stages=[MixtureStage(50, {big: 1})], block=5)


def test_a_mixture_with_stages_goes_to_other_processes_whole(splits):
    mixture = staged(splits, CHANGES)
    assert pickle.loads(pickle.dumps(mixture)).describe() == mixture.describe()
    assert repr(mixture).endswith("37 samples, 4 later stages)")
    assert mixture.describe()["stages"][1:3] == [
        {"start": 160, "weights": [0, 1, 1], "ramp": False}, {"start": 290, "weights": [1, 0, 1], "ramp": True}
    ]  # fmt: skip


@pytest.mark.slow
def test_a_cache_holds_the_windows_of_all_stages(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    many = {name: write_split(repository, name, [5] * 40, first) for name, first in (("a", 0), ("b", 1000))}
    mixture = staged(many, [(80, (1, 7)), (240, (0, 1))], weights=(1, 0), block=8, epoch_samples=320)
    assert most_of(mixture, 8) == [8, 8]
    assert most_of(mixture, 80)[1] >= 80
    first, second = (split.table.size_bytes / 200 for split in many.values())
    assert clock_steps(mixture) == [round(first), round(second)]
    options = {"order": OrderConfig(seed=2, shuffle="windowed", lanes=1, block=10), "prefetch": 1}
    with Cache(tmp_path / "small", budget=1) as cache, pytest.raises(CacheFullError) as refused:
        Numbers(mixture, 8, cache=cache, **options)
    budget = int(str(refused.value).split("needs ")[1].split()[0])
    with Cache(tmp_path / "cache", budget=budget) as cache:
        line = line_of(mixture, 900, batch_size=8, cache=cache, **options)
        assert cache.status().resident_bytes <= budget
    assert line == line_of(mixture, 900, batch_size=8, order=options["order"])


def test_a_ledger_goes_on_over_a_resume_with_other_stages(splits, tmp_path):
    plain = Mixture(list(zip(splits.values(), (5, 3, 2), strict=True)), block=10, epoch_samples=40)
    states, mixtures = [None], [plain, staged(splits, [(20, (0, 1, 1))], epoch_samples=40)]
    for mixture, steps, ranks in zip(mixtures, (2, 2), (2, 3), strict=True):
        for rank in range(ranks):
            with Numbers(mixture, 4, rank=rank, world_size=ranks, ledger=tmp_path / "ledger") as loader:
                if states[0] is not None:
                    loader.load_state_dict(states[0])
                for _ in itertools.islice(loader, steps):
                    pass
                states.append(loader.state_dict())
        states = states[-1:]
    result = audit_folders([tmp_path / "ledger"])
    assert result.disagreements == []
    assert [(epoch.served, epoch.is_faultless) for epoch in result.epochs] == [(40, True)]
    other = staged(splits, [(20, (0, 1, 1))], weights=(5, 2, 2), epoch_samples=40)
    with pytest.raises(ConfigError, match="is the ledger of"):
        next(iter(Numbers(other, 4, ledger=tmp_path / "ledger")))


def test_ranks_with_other_stages_are_named_by_the_audit(splits, tmp_path):
    for rank, start in enumerate((20, 30)):
        mixture = staged(splits, [(start, (0, 1, 1))], epoch_samples=40)
        with Numbers(mixture, 4, rank=rank, world_size=2, ledger=tmp_path / "ledger") as loader:
            list(loader)
    assert any("ranks differ in order" in text for text in audit_folders([tmp_path / "ledger"]).disagreements)
