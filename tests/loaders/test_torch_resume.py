"""States of StatefulDataLoader and ResumableDataLoader: the rest of the epoch, exactly, at any number of workers."""

import contextlib
import json
import multiprocessing
import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.loaders import DataRanks, DecodeConfig, ImageLoader
from datasvc.loaders.torch import Dataset, IterableDataset, OrderBatchSampler, ResumableDataLoader, order_state
from tests.examples import examples
from tests.loaders.test_torch_order import assert_same
from tests.loaders.torch_transforms import draw_everywhere

# A worker of torch's that is left in the middle of an epoch may abort while it ends: Python stops its queue's thread
# inside of C++. Nothing is lost by that but the worker, and torch says so from a finalizer.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BATCH = 38
KINDS = ["map", "iterable"]


@pytest.fixture(scope="module")
def dataset(digits):
    return Dataset(digits["val"], columns=("key",), transform=draw_everywhere)


def source_of(kind, dataset, **order):
    batches = OrderBatchSampler(dataset, **{"batch_size": BATCH, "seed": 5, "tail": "short", **order})
    return batches if kind == "map" else IterableDataset(dataset, batches)


def resumable(kind, dataset, num_workers, *, options=None, **order):
    source = source_of(kind, dataset, **order)
    if kind == "map":
        return ResumableDataLoader(dataset, source, num_workers=num_workers, **options or {})
    return ResumableDataLoader(source, num_workers=num_workers, **options or {})


def stateful(source, dataset, num_workers, **options):
    if isinstance(source, IterableDataset):
        return StatefulDataLoader(source, batch_size=source.batch_size, num_workers=num_workers, **options)
    return StatefulDataLoader(dataset, batch_sampler=source, num_workers=num_workers, **options)


@pytest.fixture(scope="module")
def epochs(dataset):
    """The batches of three epochs, served alone and at once."""
    loader = resumable("map", dataset, 0)
    return [list(loader) for _ in range(3)]


def read(loader, count):
    """Return the first batches of a `for` that is left in the middle."""
    batches = []
    with contextlib.closing(iter(loader)) as iterator:
        for _ in range(count):
            batches.append(next(iterator))
    return batches


def keys_of(batches):
    return [key for batch in batches for key in batch["key"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_for_goes_on_where_the_last_one_stopped_with_any_workers(dataset, epochs, kind):
    for num_workers, options in ((0, {}), (2, {}), (2, {"persistent_workers": True})):
        loader = resumable(kind, dataset, num_workers, options=options)
        assert len(loader) == 10
        assert_same(read(loader, 3), epochs[0][:3])
        assert_same(list(loader), epochs[0][3:])
        assert loader.epoch == 1
        assert_same(list(loader), epochs[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_counts_what_was_handed_over_and_goes_to_any_number_of_workers(dataset, epochs, kind):
    saved = resumable(kind, dataset, 3, options={"prefetch_factor": 4})
    iterator = iter(saved)
    states = [json.loads(json.dumps(saved.state_dict()))]
    for _ in range(10):
        next(iterator)
        states.append(json.loads(json.dumps(saved.state_dict())))
    assert [state["position"] for state in states] == [0, 38, 76, 114, 152, 190, 228, 266, 304, 342, 360]
    for count, num_workers in ((4, 0), (7, 2), (1, 1)):
        loader = resumable(kind, dataset, num_workers)
        loader.load_state_dict(states[count])
        assert_same(list(loader), epochs[0][count:])
        assert loader.state_dict()["epoch"] == 1
    assert next(iterator, None) is None
    loader.load_state_dict(states[10])
    assert_same(read(loader, 1), epochs[1][:1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_loaded_into_the_sampler_reaches_whatever_is_made_of_it(dataset, epochs, num_workers):
    batches = source_of("map", dataset)
    batches.load_state_dict(batches.order.state_at(1, 3 * BATCH))
    assert batches.cursor == (1, 3 * BATCH)
    samples = IterableDataset(dataset, batches)
    assert samples.cursor == (1, 3 * BATCH)
    loaders = [
        stateful(samples, dataset, num_workers),
        ResumableDataLoader(samples, num_workers=num_workers),
        ResumableDataLoader(dataset, batches, num_workers=num_workers),
    ]
    assert loaders[1].state_dict() == loaders[2].state_dict() == batches.order.state_at(1, 3 * BATCH)
    for loader in loaders:
        assert_same(list(loader), epochs[1][3:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_begins_with_the_epoch_that_was_set_before_it_was_made(dataset, epochs, kind):
    source = source_of(kind, dataset)
    source.set_epoch(2)
    loader = ResumableDataLoader(*((source,) if kind == "iterable" else (dataset, source)))
    assert loader.epoch == 2
    assert_same(read(loader, 2), epochs[2][:2])


def test_a_state_loaded_inside_a_loop_ends_it(dataset, epochs):
    loader = resumable("map", dataset, 0)
    state = loader.state_dict()
    for batch in loader:
        assert_same([batch], epochs[0][:1])
        loader.load_state_dict(state)
    assert_same(list(loader), epochs[0])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_torchdata_resumes_at_the_same_workers_in_the_middle_and_between_epochs(dataset, epochs, kind, num_workers):
    source = source_of(kind, dataset)
    source.set_epoch(1)
    loader = stateful(source, dataset, num_workers)
    iterator = iter(loader)
    assert_same([next(iterator) for _ in range(3)], epochs[1][:3])
    middle = loader.state_dict()
    assert_same(list(iterator), epochs[1][3:])
    end = loader.state_dict()

    source = source_of(kind, dataset)
    source.set_epoch(1)
    loader = stateful(source, dataset, num_workers)
    loader.load_state_dict(middle)
    assert_same(list(loader), epochs[1][3:])
    source.set_epoch(2)
    assert_same(list(loader), epochs[2])

    source = source_of(kind, dataset)
    source.set_epoch(2)
    loader = stateful(source, dataset, num_workers, persistent_workers=num_workers > 0)
    loader.load_state_dict(end)
    assert_same(list(loader), epochs[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_torchdata_goes_to_any_other_number_of_workers(dataset, epochs, kind):
    states = {}
    for num_workers, every in ((0, 1), (2, 1), (3, 4)):
        source = source_of(kind, dataset)
        source.set_epoch(1)
        options = {"snapshot_every_n_steps": every} if num_workers else {}
        loader = stateful(source, dataset, num_workers, **options)
        iterator = iter(loader)
        assert order_state(loader.state_dict()) == source.order.state_at(1, 0)
        for count in range(1, 11):
            next(iterator)
            states[num_workers, count] = loader.state_dict()
            expected = source.order.state_at(1, min(count * BATCH, 360))
            assert order_state(states[num_workers, count]) == expected
        assert next(iterator, None) is None
        assert order_state(loader.state_dict()) == source.order.state_at(2, 0)
    with pytest.raises((AssertionError, ConfigError)):  # torchdata's own way with another number of workers
        loader = stateful(source_of(kind, dataset), dataset, 1)
        loader.load_state_dict(states[2, 5])
        iter(loader)
    for (num_workers, count), wanted in (((2, 5), 1), ((3, 6), 2), ((0, 7), 2), ((2, 3), 0)):
        source = source_of(kind, dataset)
        source.load_state_dict(states[num_workers, count])
        loader = stateful(source, dataset, wanted)
        assert_same(list(loader), epochs[1][count:])
        ours = resumable(kind, dataset, wanted)
        ours.load_state_dict(states[num_workers, count])
        assert_same(read(ours, 1), epochs[1][count : count + 1])
    # And once more: a state of a run that was resumed, of what it did since.
    source = source_of(kind, dataset)
    source.load_state_dict(states[3, 6])
    loader = stateful(source, dataset, 2)
    iterator = iter(loader)
    next(iterator)
    again = source_of(kind, dataset)
    again.load_state_dict(loader.state_dict())
    assert_same(list(stateful(again, dataset, 0)), epochs[1][7:])


def test_a_batch_size_that_is_not_the_orders_is_said_by_its_states(dataset):
    source = source_of("iterable", dataset)
    half = StatefulDataLoader(source, batch_size=BATCH // 2)
    iterator = iter(half)
    next(iterator)
    with pytest.raises(
        ConfigError, match=r"19 samples left of a batch; give the loader the batch_size of its data set"
    ):
        half.state_dict()
    twice = StatefulDataLoader(source, batch_size=BATCH * 2)
    next(iter(twice))
    with pytest.raises(ConfigError, match="handed over 1 batch, made of 2 of the order"):
        order_state(twice.state_dict())


def test_what_is_no_state_is_said_to_be_none(digits, dataset):
    loader = resumable("map", dataset, 0)
    plain = StatefulDataLoader(dataset, batch_size=4)
    next(iter(plain))
    with pytest.raises(ConfigError, match="no state of a data set or sampler of datasvc"):
        loader.load_state_dict(plain.state_dict())
    other = stateful(OrderBatchSampler(digits["train"], batch_size=4), Dataset(digits["train"], columns=("key",)), 0)
    next(iter(other))
    with pytest.raises(StateMismatchError, match=r"the state belongs to .*, this loader reads"):
        loader.load_state_dict(other.state_dict())
    for option in ("batch_size", "shuffle", "in_order"):
        with pytest.raises(TypeError, match=option):
            ResumableDataLoader(dataset, source_of("map", dataset), **{option: False})
    with pytest.raises(ConfigError, match="expected a data set with an OrderBatchSampler"):
        ResumableDataLoader(dataset)
    with pytest.raises(ConfigError, match="the batches are of"):
        ResumableDataLoader(dataset, OrderBatchSampler(digits["train"], batch_size=4))


@examples(25)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 60), st.integers(0, 6)),
        min_size=1,
        max_size=6,
    )
)
def test_any_sequence_of_kills_and_resizes_serves_the_epoch_once(digits, runs):
    keys_only = Dataset(digits["val"], columns=("key",))
    state, served = None, []
    for kind, world_size, batch_size, count in [*runs, ("map", 1, 100, 99)]:
        states = []
        for rank in range(world_size):
            loader = resumable(
                kind, keys_only, 0, batch_size=batch_size, tail="short", ranks=DataRanks(rank, world_size)
            )
            if state is not None:
                loader.load_state_dict(state)
            with contextlib.closing(iter(loader)) as batches:
                for _ in range(count):
                    if loader.epoch:
                        break
                    served += next(batches, {"key": []})["key"]
            states.append(loader.state_dict())
        state = min(states, key=lambda found: (found["epoch"], found["position"]))
        assert len({(found["epoch"], found["position"]) for found in states}) == 1 or state["epoch"] == 0
        if all(found["epoch"] for found in states):
            break
    assert sorted(served) == sorted(sample["key"] for sample in keys_only)


def test_a_state_goes_to_the_loader_that_decodes_itself_and_back(digits, dataset, epochs):
    ours = resumable("iterable", dataset, 0)
    read(ours, 2)
    with ImageLoader(
        digits["val"], batch_size=100, training=True, size=16, seed=5, decode=DecodeConfig(num_threads=1)
    ) as images:
        images.load_state_dict(ours.state_dict())
        assert next(iter(images)).positions.tolist() == list(range(76, 176))
        ours.load_state_dict(images.state_dict())
    assert keys_of(list(ours)) == keys_of(epochs[0])[176:]


def _train_until_killed(dataset, kind, folder):
    """Write what each batch had, then the state after it, as a job does; die in the middle of a step."""
    loader = resumable(kind, dataset, 2, ranks=DataRanks(0, 1))
    for number, batch in enumerate(loader):
        (folder / "state").write_text(json.dumps([number + 1, loader.state_dict(), batch["key"]]))
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_was_killed_resumes_from_its_last_state(dataset, epochs, kind, tmp_path):
    # A process that was forked while other tests' threads ran may wait for a lock that nothing frees any more.
    job = multiprocessing.get_context("spawn").Process(target=_train_until_killed, args=(dataset, kind, tmp_path))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    count, state, last = json.loads((tmp_path / "state").read_text())
    assert (count, last) == (5, epochs[0][4]["key"])
    loader = resumable(kind, dataset, 1)
    loader.load_state_dict(state)
    assert_same(list(loader), epochs[0][5:])


@pytest.mark.slow
def test_spawned_workers_that_persist_serve_the_same(dataset, epochs):
    options = {"multiprocessing_context": "spawn", "persistent_workers": True}
    loader = resumable("iterable", dataset, 1, options=options)
    assert_same(read(loader, 4), epochs[0][:4])
    assert_same(list(loader), epochs[0][4:])
    assert_same(list(loader), epochs[1])


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchdata_with_two_spawned_workers_resumes(dataset, epochs, kind, context):
    source = source_of(kind, dataset)
    loader = stateful(source, dataset, 2, multiprocessing_context=context)
    iterator = iter(loader)
    assert_same([next(iterator) for _ in range(3)], epochs[0][:3])
    state = loader.state_dict()
    assert_same(list(iterator), epochs[0][3:])
    loader = stateful(source_of(kind, dataset), dataset, 2, multiprocessing_context=context, persistent_workers=True)
    loader.load_state_dict(state)
    assert_same(list(loader), epochs[0][3:])
    later = resumable(kind, dataset, 1, options={"multiprocessing_context": context})
    later.load_state_dict(state)
    assert_same(list(later), epochs[0][3:])


def test_what_a_transform_draws_does_not_reach_the_training_loop(dataset):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn = []
    loader = resumable("map", dataset, 0)
    loader_draws = iter(loader)  # torch's own iterator draws a seed for workers when it starts
    next(loader_draws)
    torch.manual_seed(0)
    for _ in range(3):
        drawn.append(torch.rand(()))
        next(loader_draws)
    assert torch.equal(torch.stack(drawn), expected)


def test_a_loop_after_the_last_batch_of_an_epoch_is_the_next_epoch(dataset):
    """The state of the last batch goes to a new loader and to `ImageLoader`'s format unchanged."""

    def make_loader(state=None):
        loader = ResumableDataLoader(dataset, OrderBatchSampler(dataset, batch_size=100, seed=1))
        if state is not None:
            loader.load_state_dict(state)
        return loader

    loader = make_loader()
    for _ in loader:
        assert loader.epoch == 0
        state = loader.state_dict()
    again = make_loader(state)
    assert again.state_dict() == state
    assert again.epoch == 1
    assert len(list(again)) == len(again)
    assert again.epoch == 2
    for number, _ in enumerate(again, 1):
        assert again.epoch == 2
        if number == len(again):
            break
    assert again.epoch == 3
    assert len(list(again)) == len(again)
    assert again.epoch == 4
