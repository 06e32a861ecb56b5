"""Which samples a job has after it lost a worker, or was started again with other workers than it had."""

import pytest

import datasvc
import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.loaders import DataRanks, DecodeConfig, ImageLoader, Mixture
from datasvc.loaders.torch import OrderBatchSampler, ResumableDataLoader
from datasvc.models import ConsumptionTracker
from datasvc.replay.batch_at import batch_at
from datasvc.testing import small_dataset
from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt, HostUpdateResult
from tests.models.trainings import commit


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = datasvc.open(str(tmp_path_factory.mktemp("lost") / "repo"), create=True)
    small_dataset(repo, "pets", splits={"train": 48, "val": 24}, classes=3, image_size=8)
    return repo


def images(samples, rank, size, batch_size, **options):
    return ImageLoader(samples, batch_size=batch_size, training=True, size=8, ranks=DataRanks(rank, size), **options)


def with_torch(samples, rank, size, batch_size):
    batches = OrderBatchSampler(samples, batch_size=batch_size, training=True, ranks=DataRanks(rank, size))
    return ResumableDataLoader(list(range(len(samples))), batches)


def mixture(repo):
    pets = repo.dataset("pets")
    return Mixture([(pets["train"], 2), (pets["val"], 1)], block=12, epoch_samples=48)


def taken(loader, num_batches, keys_of=lambda batch: batch.keys):
    """Return the samples of so many batches."""
    stream = iter(loader)
    return [key for _ in range(num_batches) for key in keys_of(next(stream))]


def test_two_workers_continue_what_one_has_begun(repo):
    """huggingface/transformers#40245: after a batch of one worker, two workers skipped one each, so one was lost."""
    split = repo.dataset("pets")["train"]
    for make, keys_of in ((images, lambda batch: batch.keys), (with_torch, lambda batch: batch.tolist())):
        whole = taken(make(split, 0, 1, 4), 12, keys_of)
        first = make(split, 0, 1, 4)
        assert taken(first, 1, keys_of) == whole[:4]
        rest = []
        for rank in range(2):
            loader = make(split, rank, 2, 4)
            loader.load_state_dict(first.state_dict())
            rest += taken(loader, 5, keys_of)
        assert sorted(whole[:4] + rest) == sorted(whole[:44])


@pytest.mark.parametrize("choose", [lambda repo: repo.dataset("pets")["train"], mixture], ids=["split", "mixture"])
def test_one_rank_continues_from_the_state_of_any_of_two(repo, choose):
    """NVIDIA-NeMo/Megatron-Bridge#5637: one rank took the state of rank 0 of two, and skipped or repeated samples."""
    samples = choose(repo)
    whole = taken(images(samples, 0, 1, 8), 6)
    two = [images(samples, rank, 2, 4) for rank in range(2)]
    first = [taken(loader, 2) for loader in two]
    assert sorted(first[0] + first[1]) == sorted(whole[:16])
    assert two[0].state_dict() == two[1].state_dict()
    for loader in two:
        one = images(samples, 0, 1, 8)
        one.load_state_dict(loader.state_dict())
        assert taken(one, 4) == whole[16:]


def test_batches_that_a_lost_worker_had_prefetched_are_those_of_its_successor(repo):
    """ray-project/ray#62787: what the data service had handed to the lost worker counted as trained on."""
    split = repo.dataset("pets")["train"]
    whole = taken(images(split, 1, 2, 4), 6)
    lost = images(split, 1, 2, 4, decode=DecodeConfig(prefetch=3))
    stream = iter(lost)
    assert next(stream).keys + next(stream).keys == whole[:8]
    state = lost.state_dict()  # the batches after these two are under way
    successor = images(split, 1, 2, 4)
    successor.load_state_dict(state)
    assert taken(successor, 4) == whole[8:]


@pytest.fixture
def places(monkeypatch):
    """Sets rank and size as a round does."""

    def be(rank, size):
        monkeypatch.setattr("datasvc.trainer.job.runtime.rank", lambda: rank)
        monkeypatch.setattr("datasvc.trainer.job.runtime.size", lambda: size)

    hvd.init()
    yield be
    hvd.shutdown()


@pytest.mark.parametrize("leaves_in_order", [False, True], ids=["lost", "removed"])
def test_samples_of_workers_that_left_do_not_come_again(places, leaves_in_order):
    """horovod/horovod#3143, #3399: what the worker that left had recorded came again, also if it left in order."""
    states = []
    for rank in range(3):
        places(rank, 3)
        states.append(hvd.elastic.TorchState(sampler=hvd.elastic.ElasticSampler(range(24), seed=5)))
    done = []
    for _ in range(2):
        for rank, state in enumerate(states):
            done += state.sampler.get_indices(0, 2)
            places(rank, 3)
            state.sampler.record_batch(0, 2)
            state.sampler.reset()
    places(0, 1)
    for state in states[:2]:
        if leaves_in_order:
            state.on_hosts_updated(1, HostUpdateResult.removed)
            with pytest.raises(HostsUpdatedInterrupt):
                state.commit()
        else:
            state.commit()
            state.sampler.record_batch(0, 2)  # of a batch whose gradients the lost worker never sent
            state.restore()
    rest = []
    for rank, state in enumerate(states[:2]):
        places(rank, 2)
        state.on_reset()
        rest += list(state.sampler)
    assert sorted(done + rest) == list(range(24))


def test_only_the_epoch_that_was_interrupted_begins_in_its_middle(repo, places):
    """intelligent-machine-learning/dlrover#591: all later epochs began where the interrupted one had stopped."""
    split = repo.dataset("pets")["train"]
    first = images(split, 0, 2, 4)
    taken(first, 2)
    second = [images(split, rank, 3, 4) for rank in range(3)]
    for loader in second:
        loader.load_state_dict(first.state_dict())
        taken(loader, 2)
    epoch = [key for loader in second for batch in loader for key in batch.keys]
    assert (second[0].epoch, len(set(epoch)), len(epoch)) == (2, 48, 48)
    places(0, 2)
    sampler = hvd.elastic.ElasticSampler(range(24))
    sampler.load_state_dict({"epoch": 1, "processed_num": 12})
    assert len(sampler) == 6
    sampler.set_epoch(2)
    assert len(sampler) == 12


def test_the_first_batch_after_a_restart_is_the_one_after_the_last(repo):
    """facebookresearch/metaseq#419: step 46,001 had the batch of step 46,002 after each restart."""
    split = repo.dataset("pets")["train"]
    whole = [batch.keys for batch in images(split, 0, 1, 6)]
    step, parent, state = 0, None, None
    for size in (1, 3, 2):
        loaders = [images(split, rank, size, 6 // size) for rank in range(size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        tracker = ConsumptionTracker(loaders[0], step=step)
        for loader in loaders:
            taken(loader, 2)
        step, state = step + 2, tracker.use().state
        parent = commit(repo.repository, "restarted", step, [tracker.use()], parent=parent)
    assert [batch_at(repo.repository, parent, number).keys for number in range(1, 7)] == whole[:6]
    assert [batch_at(repo.repository, parent, number).step.ranks for number in (2, 3, 4, 5)] == [1, 3, 3, 2]
    with pytest.raises(ConfigError, match="step 5 had 2 data ranks"):
        batch_at(repo.repository, parent, 5, rank=2)
