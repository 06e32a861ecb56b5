"""torch's own DataLoader in our order: the same batches with any number of workers, over ranks and epochs."""

import itertools
import pickle
from collections import deque

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.loaders.torch import Dataset, IterableDataset, OrderBatchSampler
from datasvc.loaders.torch.rank_order import RankOrder
from datasvc.loaders.torch.sampler import DrawnBatches
from datasvc.loaders.torch.states import DrawState
from datasvc.order import AccessOrder, OrderConfig, count_steps
from tests.examples import examples
from tests.loaders.torch_transforms import draw_everywhere

# A worker of torch's that is left in the middle of an epoch may abort while it ends: Python stops its queue's thread
# inside of C++. Nothing is lost by that but the worker, and torch says so from a finalizer.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BATCH = 38


@pytest.fixture(scope="module")
def dataset(digits):
    return Dataset(digits["val"], columns=("key",), transform=draw_everywhere)


def make_loader(kind, dataset, num_workers, *, options=None, **order):
    batches = OrderBatchSampler(dataset, **{"batch_size": BATCH, "seed": 5, "tail": "short", **order})
    if kind == "map":
        return batches, DataLoader(dataset, batch_sampler=batches, num_workers=num_workers, **options or {})
    data = IterableDataset(dataset, batches)
    return data, DataLoader(data, batch_size=data.batch_size, num_workers=num_workers, **options or {})


def assert_same(found, expected):
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert left["key"] == right["key"]
        assert torch.equal(left["drawn"], right["drawn"])
        assert torch.equal(left["mask"], right["mask"])


def test_batches_follow_the_access_order(dataset, digits):
    split = digits["val"]
    order = AccessOrder(split.table.samples_per_shard, OrderConfig(seed=5), 0)
    shards, rows = order.locate(range(len(split)))
    stored = [
        split.origin.open_shard(split.table.shard(n)).column("key").to_pylist() for n in range(split.table.num_shards)
    ]
    expected = [stored[shard][row] for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]
    for kind in ("map", "iterable"):
        _, loader = make_loader(kind, dataset, 0)
        assert [key for batch in loader for key in batch["key"]] == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_batches_are_bit_equal_with_any_number_of_workers_and_epochs_differ(dataset, kind, num_workers):
    source, alone = make_loader(kind, dataset, 0)
    others, many = make_loader(kind, dataset, num_workers, options={"persistent_workers": True})
    epochs = []
    for epoch in range(2):
        source.set_epoch(epoch)
        others.set_epoch(epoch)
        epochs.append(list(alone))
        assert len(epochs[-1]) == len(alone) == 10
        assert_same(list(many), epochs[-1])
    assert epochs[0][0]["key"] != epochs[1][0]["key"]
    assert sorted(key for batch in epochs[0] for key in batch["key"]) == sorted(
        key for batch in epochs[1] for key in batch["key"]
    )


def test_without_set_epoch_an_epoch_is_served_again_as_it_was(dataset):
    for kind in ("map", "iterable"):
        source, loader = make_loader(kind, dataset, 0)
        first = list(loader)
        assert_same(list(loader), first)
        source.set_epoch(1)
        assert next(iter(loader))["key"] != first[0]["key"]
        source.set_epoch(0)
        assert_same(list(loader), first)


def test_set_epoch_of_the_epoch_of_a_loaded_state_keeps_its_place(dataset):
    for kind in ("map", "iterable"):
        source, loader = make_loader(kind, dataset, 0)
        source.set_epoch(1)
        whole = list(loader)
        source.load_state_dict(source.order.state_at(1, 2 * BATCH))
        source.set_epoch(1)
        assert_same(list(loader), whole[2:])
        source.set_epoch(2)
        source.set_epoch(1)
        assert_same(list(loader), whole)


def test_two_ranks_serve_the_epoch_and_padding_says_so(dataset):
    for kind in ("map", "iterable"):
        keys = []
        for rank in range(2):
            _, loader = make_loader(kind, dataset, 0, tail="pad", ranks=DataRanks(rank, 2))
            batches = list(loader)
            assert [len(batch["key"]) for batch in batches] == [BATCH] * len(loader)
            keys += [
                key
                for batch in batches
                for key, counts in zip(batch["key"], batch["mask"].tolist(), strict=True)
                if counts
            ]
        assert sorted(keys) == sorted(sample["key"] for sample in Dataset(dataset.split, columns=("key",)))


def in_turn(workers):
    """Yield batches as torch's loaders do: of each worker in turn that is not at its end."""
    waiting = deque(workers)
    while waiting:
        worker = waiting.popleft()
        batch = next(worker, None)
        if batch is not None:
            yield batch
            waiting.append(worker)


@examples(60)
@given(
    batch_size=st.integers(20, 300),
    world_size=st.integers(1, 3),
    num_workers=st.integers(1, 4),
    tail=st.sampled_from(["drop", "short", "pad"]),
    shuffle=st.sampled_from(["global", None]),
    start=st.integers(0, 360),
    handed=st.integers(0, 12),
)
@example(  # one sample is left for two ranks
    batch_size=179, world_size=2, num_workers=2, tail="short", shuffle=None, start=1, handed=1
)
def test_workers_in_turn_draw_what_one_process_does_and_the_least_of_their_states_is_where_it_stands(
    digits, batch_size, world_size, num_workers, tail, shuffle, start, handed
):
    split = digits["val"]
    assume(tail != "drop" or batch_size * world_size <= len(split))
    served = []
    for rank in range(world_size):
        order = RankOrder(
            split,
            OrderConfig(seed=1, shuffle=shuffle),
            batch_size=batch_size,
            ranks=DataRanks(rank, world_size),
            tail=tail,
        )
        alone = list(DrawnBatches(order, 3, start))
        assert all(alone)
        workers = [DrawnBatches(order, 3, start, worker=w, num_workers=num_workers) for w in range(num_workers)]
        turns = in_turn(workers)
        drawn = list(itertools.islice(turns, handed))
        if len(drawn) < len(alone):
            states = [DrawState.from_dict(worker.state_dict()) for worker in workers]
            assert min(state.position for state in states) == start + len(drawn) * order.global_batch
        assert drawn + list(turns) == alone
        if start == 0:
            assert order.count_rank_batches() == (len(alone), sum(map(len, alone)))
        served += [index for batch in alone for index in batch if index.counts is not False]
    stop = min(len(split), start + count_steps(start, len(split), order.global_batch, tail) * order.global_batch)
    assert sorted(index.position for index in served) == list(range(start, stop))
    assert stop == len(split) or tail == "drop"


def test_any_map_style_data_set_may_be_served_in_our_order(digits):
    split = digits["val"]
    loader = DataLoader(
        [number * 10 for number in range(len(split))], batch_sampler=OrderBatchSampler(split, batch_size=60)
    )
    assert sorted(torch.cat(list(loader)).tolist()) == [number * 10 for number in range(len(split))]


def test_an_iterable_data_set_that_came_by_pickle_tells_its_own_workers_the_epoch(dataset):
    source, _ = make_loader("iterable", dataset, 0)
    source.set_epoch(2)
    copy = pickle.loads(pickle.dumps(source))
    source.set_epoch(4)
    loader = DataLoader(copy, batch_size=BATCH, num_workers=1, persistent_workers=True)
    first = next(iter(loader))["key"]
    copy.set_epoch(3)
    second = next(iter(loader))["key"]
    for epoch, expected in ((2, first), (3, second)):
        source.set_epoch(epoch)
        assert next(iter(DataLoader(source, batch_size=BATCH)))["key"] == expected


def test_wrong_arguments_and_states_are_refused(digits, dataset):
    split = digits["val"]
    for options, said in (
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 361}, "gives no full batch of 361 x 1 rank with tail='drop'"),
        ({"batch_size": 1, "ranks": 2}, "ranks is 2; expected DataRanks"),
        ({"batch_size": 1, "ranks": DataRanks(1, 361)}, "fewer samples than there are ranks"),
        ({"batch_size": 1, "tail": "wrap"}, "tail is 'wrap'"),
        ({"batch_size": 1, "shuffle": "windowed", "order": OrderConfig()}, "give them in the OrderConfig only"),
    ):
        with pytest.raises(ConfigError, match=said):
            OrderBatchSampler(split, **options)
    batches = OrderBatchSampler(split, batch_size=10, seed=5)
    with pytest.raises(ConfigError, match="epoch is -1"):
        batches.set_epoch(-1)
    with pytest.raises(ConfigError, match=r"the data set is of .*val.*, the batches are of .*train"):
        IterableDataset(dataset, OrderBatchSampler(digits["train"], batch_size=10))
    good = batches.order.state_at(1, 20)
    for source in (batches, IterableDataset(dataset, batches)):
        source.load_state_dict(good)
        assert source.epoch == 1
        with pytest.raises(StateMismatchError, match="open the version that the state was saved with"):
            source.load_state_dict(OrderBatchSampler(digits["train"], batch_size=9, seed=5).order.state_at(0, 0))
        with pytest.raises(StateMismatchError, match="seed=6"):
            source.load_state_dict(good | {"seed": 6})
        with pytest.raises(ConfigError, match="has format 7; this datasvc reads format 1"):
            source.load_state_dict(good | {"format": 7})
        with pytest.raises(ConfigError, match="has format None"):
            source.load_state_dict({"epoch": 3})
