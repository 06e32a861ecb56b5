"""Weighted views serve each sample within one of its share, in every epoch, order and process."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.torch.sampler import OrderBatchSampler
from datasvc.models import ConsumptionTracker, find_consumers
from datasvc.order import OrderConfig
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.format.view_table import EpochGrid
from datasvc.shards.versions.delete import delete
from tests.examples import examples
from tests.loaders.numbered import Numbers
from tests.models.trainings import commit
from tests.shards.written_versions import write_version

SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("blob", pa.large_binary(), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("kind", pa.string()),
        pa.field("score", pa.float64()),
    ]
)
ORDERS = [
    OrderConfig(seed=3),
    OrderConfig(shuffle=None),
    OrderConfig(seed=5, shuffle="windowed", lanes=2, block=7),
    OrderConfig(seed=5, shuffle="windowed", lanes=3, block=4, sticky=True),
]


def score(number):
    return 0.0 if number % 5 == 0 else float(number % 7) ** 3


def sample(number):
    kind = "many" if number % 8 else "few"
    return {"key": str(number), "blob": str(number).encode(), "label": number, "kind": kind, "score": score(number)}


@pytest.fixture
def split(repository):
    shards = [[sample(number) for number in range(first, first + 13)] for first in range(0, 91, 13)]
    write_version(repository, "pets", {"train": shards}, SCHEMA)
    delete(repository, "pets", where="label in (3, 40)")
    return open_dataset(repository, "pets")["train"]


def served(loader_split, order, epoch, batch_size=5):
    """Return the numbers of the samples that an epoch serves, in their order."""
    loader = Numbers(loader_split, batch_size, order=order, prefetch=0)
    state = loader.state_dict()
    loader.load_state_dict({**state, "epoch": epoch})
    return [number for _, numbers in loader for number in numbers]


@examples(60)
@given(
    weights=st.lists(st.integers(0, (1 << 20) - 1), min_size=1, max_size=40).filter(any),
    num_samples=st.integers(1, 1 << 31),
    offset=st.integers(0, 1 << 60),
)
def test_a_grid_gives_each_sample_its_share_rounded_down_or_up_at_any_size(weights, num_samples, offset):
    total = sum(weights)
    grid = EpochGrid(num_samples, total, offset % total, np.uint64(7))
    counts = grid.counts(0, np.array(weights))
    assert counts.sum() == num_samples
    for count, weight in zip(counts.tolist(), weights, strict=True):
        assert abs(Fraction(num_samples * weight, total) - count) < 1
        assert weight or not count
    half = len(weights) // 2
    before = sum(weights[:half])
    assert grid.counts(before, np.array(weights[half:], np.int64)).tolist() == counts[half:].tolist()
    copies = grid.copies(before, half, np.array(weights[half:], np.int64))
    assert copies.sum() == counts[half:].sum()
    assert all(
        abs(Fraction(num_samples * weight, total) - count) < 1
        for count, weight in zip(copies.tolist(), weights[half:], strict=True)
    )


def test_a_grid_of_very_large_weights_is_exact():
    weights = np.array([1 << 50, 3, (1 << 50) + 1], np.int64)
    grid = EpochGrid(1 << 40, int(weights.sum()), 12345, np.uint64(7))
    points = [0]
    for weight in np.cumsum(weights).tolist():
        points.append(-(-((1 << 40) * weight - 12345) // int(weights.sum())))
    assert grid.counts(0, weights).tolist() == np.diff(points).tolist()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_each_epoch_serves_each_sample_within_one_of_its_share_and_those_of_weight_0_never(split, order):
    view = split.weighted("score")
    numbers = [each["label"] for each in split]
    total = sum(map(score, numbers))
    assert len(view) == sum(1 for number in numbers if score(number))
    for epoch in range(4):
        counts = Counter(served(view, order, epoch))
        assert counts.total() == len(view)
        for number in numbers:
            share = len(view) * score(number) / total
            assert abs(counts[number] - share) < 1, number
            assert score(number) or not counts[number]


@pytest.mark.slow
def test_over_many_epochs_the_shares_are_exact_and_with_sticky_lanes_each_epoch_has_the_same_samples(split):
    view = split.weighted("score")
    total = sum(score(each["label"]) for each in split)
    counts = sum((Counter(served(view, ORDERS[0], epoch)) for epoch in range(200)), Counter())
    for each in view:
        assert counts[each["label"]] / 200 == pytest.approx(len(view) * score(each["label"]) / total, abs=0.1)
    assert Counter(served(view, ORDERS[3], 0)) == Counter(served(view, ORDERS[3], 1))
    assert served(view, ORDERS[3], 0) != served(view, ORDERS[3], 1)


def test_a_split_with_more_samples_than_are_kept_in_memory_is_served_alike(split, monkeypatch):
    view = split.weighted("score")
    expected = [served(view, order, 1) for order in ORDERS]
    monkeypatch.setattr("datasvc.shards.versions.weights._MAX_ROWS", 20)
    assert [served(split.weighted("score"), order, 1) for order in ORDERS] == expected


def test_copies_of_a_sample_are_a_lap_apart_without_a_shuffle(split):
    view = split.where("label < 13").weighted(weights=[1, 1, 1, 9, *[1] * 8])
    numbers = served(view, OrderConfig(shuffle=None), 0)
    assert len(numbers) == len(view) == 12
    many = max(Counter(numbers), key=Counter(numbers).get)
    first, second, *_ = [index for index, number in enumerate(numbers) if number == many]
    assert sorted(set(numbers)) == numbers[: len(set(numbers))]
    assert first < len(set(numbers)) <= second


def test_the_shares_are_those_of_torchs_weighted_sampler_by_a_chi_square(split):
    view = split.weighted("score")
    weights = torch.tensor([score(each["label"]) for each in split], dtype=torch.float64)
    num_epochs = 60
    ours = Counter(number for epoch in range(num_epochs) for number in served(view, ORDERS[0], epoch))
    torch.manual_seed(0)
    sampler = torch.utils.data.WeightedRandomSampler(weights, num_epochs * len(view), replacement=True)
    numbers = [each["label"] for each in split]
    theirs = Counter(numbers[index] for index in sampler)
    compared = [(ours[number], theirs[number]) for number in numbers if ours[number] + theirs[number]]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in compared)
    freedom = len(compared) - 1
    # The quantile 0.999 of the chi-square distribution, by Wilson and Hilferty.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit
    uniform = num_epochs * len(view) / len(compared)
    assert sum((uniform - b) ** 2 / (uniform + b) for _, b in compared) > limit


@pytest.mark.slow
def test_runs_of_4_3_and_5_ranks_with_kills_serve_what_one_rank_serves(split):
    for order in ORDERS:
        view = split.weighted("score").where("label <> 12")
        whole = served(view, order, 0, 60) + served(view, order, 1, 60)
        found, state = [], None
        for world_size, batch_size, num_steps in [(4, 3, 2), (3, 4, 3), (5, 2, 400)]:
            loaders = [
                Numbers(view, batch_size, rank=rank, world_size=world_size, order=order, prefetch=2)
                for rank in range(world_size)
            ]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            for _ in range(num_steps):
                steps = []
                for loader in loaders:
                    step = next(iter(loader), None)
                    steps.append(step)
                if steps[0] is None:
                    continue
                pairs = [
                    pair for batch, numbers in steps for pair in zip(batch.positions.tolist(), numbers, strict=True)
                ]
                found += [(steps[0][0].epoch, position, number) for position, number in sorted(pairs)]
                if len(found) >= 2 * len(view):
                    break
            state = loaders[0].state_dict()
            for _ in loaders:
                next(iter(loaders[0]), None)  # served after the state: a kill discards it
        assert [number for _, _, number in found[: 2 * len(view)]] == whole


def test_a_sampler_of_torch_gives_the_samples_of_a_weighted_view(split):
    view = split.weighted("score")
    sampler = OrderBatchSampler(view, order=ORDERS[0], batch_size=5, tail="short")
    numbers = [
        view[int(index)]["label"] for batch in sampler for index in (batch if isinstance(batch, list) else [batch])
    ]
    assert numbers == served(view, ORDERS[0], 0)


def test_trained_on_finds_each_use_of_a_weighted_sample_alone_and_in_a_mixture(split, repository):
    view, plain = split.weighted("score"), split.where("kind = 'few'")
    mixture = Mixture([(view, 3), (plain, 1)], block=8, epoch_samples=70)
    for number, samples in enumerate([view, mixture]):
        loader = Numbers(samples, 4, order=ORDERS[2], prefetch=0)
        tracker = ConsumptionTracker(loader)
        truth = Counter()
        for _epoch in range(3):
            for batch, numbers in loader:
                truth.update(zip(map(str, numbers), [batch.epoch] * 4, batch.positions.tolist(), strict=False))
        commit(repository, f"cnn{number}", 1, [tracker.use()])
        keys = [each["key"] for each in split]
        found = find_consumers(repository, [f"cnn{number}"], keys=keys)
        assert Counter((use.key, use.epoch, use.position) for use in found.all_uses()) == truth
        assert found.gaps == {}


@pytest.mark.slow
def test_balanced_gives_classes_shares_between_their_own_and_equal_ones(split):
    def shares(view):
        numbers = [number for epoch in range(40) for number in served(view, ORDERS[0], epoch)]
        return sum(sample(number)["kind"] == "few" for number in numbers) / len(numbers)

    few = sum(1 for each in split if each["kind"] == "few") / len(split)
    assert shares(split.balanced("kind", 0)) == pytest.approx(few, abs=0.02)
    assert shares(split.balanced("kind", 1)) == pytest.approx(0.5, abs=0.02)
    middle = few**0.5 / (few**0.5 + (1 - few) ** 0.5)
    assert shares(split.balanced("kind", 0.5)) == pytest.approx(middle, abs=0.02)


def test_a_weighted_view_can_be_chosen_from_and_keeps_its_weights(split):
    view = split.weighted("score").where("kind = 'many'").take(0.7)
    counts = sum((Counter(served(view, ORDERS[0], epoch)) for epoch in range(100)), Counter())
    total = sum(score(each["label"]) for each in view)
    for each in view:
        assert counts[each["label"]] / 100 == pytest.approx(len(view) * score(each["label"]) / total, abs=0.2)
    assert ShardTable.decode(view.table.encode(), "again") == view.table


def test_weights_by_class_name_leave_out_classes_of_weight_0(repository):
    shards = [[{**sample(number), "label": number % 3, "blob": b"%d" % (number % 3)} for number in range(30)]]
    write_version(repository, "cats", {"train": shards}, SCHEMA, classes=("cat", "dog", "owl"))
    split = open_dataset(repository, "cats")["train"]
    view = split.weighted(weights={"cat": 3, "dog": 1, "owl": 0})
    counts = sum((Counter(served(view, ORDERS[0], epoch)) for epoch in range(40)), Counter())
    assert counts[0] / counts.total() == pytest.approx(0.75, abs=0.02)
    assert counts.keys() == {0, 1}
    assert view.table.label_counts == {0: 10, 1: 10}
    for weights, message in [
        ({"cow": 1}, "no class 'cow'"),
        ({"cat": 1, "dog": 2}, "classes owl of .* have no weight"),
    ]:
        with pytest.raises(ConfigError, match=message):
            split.weighted(weights=weights)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda split: split.weighted("colour"), "no column 'colour'; its columns are key"),
        (lambda split: split.weighted("kind"), "is large_string, and weights are numbers"),
        (lambda split: split.weighted(weights=[1.0]), r"have the shape \(1,\)"),
        (lambda split: split.weighted(weights=[-1.0] * len(split)), "sample 0 of .* has the weight -1.0"),
        (lambda split: split.weighted(weights=[1.0] * (len(split) - 1) + [float("nan")]), "has the weight nan"),
        (lambda split: split.weighted(weights=[float("inf")] * len(split)), "has the weight inf"),
        (lambda split: split.weighted(weights=[0] * len(split)), "all weights of .* are 0"),
        (lambda split: split.weighted(weights=dict.fromkeys(range(1000), -2)), "has the weight -2.0"),
        (lambda split: split.weighted(weights=dict.fromkeys(range(1000), float("nan"))), "has the weight nan"),
        (lambda split: split.weighted(), "not both or neither"),
        (lambda split: split.weighted("score").weighted("score"), "has weights already"),
        (lambda split: split.balanced("kind", 1.5), "expected 0"),
        (lambda split: split.balanced("colour"), "no column 'colour'"),
    ],
)
def test_weights_that_are_not_valid_are_refused(split, make, message):
    with pytest.raises(ConfigError, match=message):
        make(split)


def test_a_view_that_leaves_a_rank_empty_is_refused(split):
    view = split.where("label < 2")
    with pytest.raises(ConfigError, match=rf"{len(view)} samples\) has fewer samples than there are ranks: 400"):
        Numbers(view, 1, rank=0, world_size=400, tail="drop")


def test_damaged_weights_are_reported(split):
    view = split.weighted("score")
    other = split.weighted("label")
    path = split.repository.objects.local_path(view.table.weights[0].digest)
    path.chmod(0o644)
    path.write_bytes(split.repository.objects.local_path(other.table.weights[0].digest).read_bytes())
    with pytest.raises(CorruptDataError):
        served(view, ORDERS[0], 0)
