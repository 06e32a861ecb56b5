"""Ranks that read one run of each round: together the epoch, each sample once, from any state and at any speed."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.ledger.audit import audit
from datasvc.ledger.file import read_ledger
from datasvc.ledger.leases import Leases, plan_shares
from datasvc.loaders.core.mixture import Mixture
from tests.examples import examples
from tests.loaders.echo import ORDERS, EchoLoader, open_numbers

FRESH = count()


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return open_numbers(tmp_path_factory)


class Job:
    """All ranks of a job in one process; each reads at its own pace."""

    def __init__(self, samples, world_size, batch_size, state=None, **options):
        self.loaders = [
            EchoLoader(samples, batch_size=batch_size, rank=rank, world_size=world_size, **options)
            for rank in range(world_size)
        ]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state)
        self.rounds = [loader.read_in_rounds(9) for loader in self.loaders]
        self.streams = [self._over_epochs(loader) for loader in self.loaders]
        self.place = (-1, 0)

    @staticmethod
    def _over_epochs(loader):
        while True:
            yield from loader

    def add(self, leases):
        added = [rounds.add(leases) for rounds in self.rounds]
        assert added == added[:1] * len(added)

    def take_round(self):
        """Let one rank after the other read all of its round; return epoch, round and each rank's batches."""
        batches = []
        for stream, rounds, loader in zip(self.streams, self.rounds, self.loaders, strict=True):
            own = [next(stream)]
            before = loader.state_dict()
            while rounds.ended is None:
                assert (before["epoch"], before["position"]) == own[0].before, "a state is before the round"
                own.append(next(stream))
                before = loader.state_dict() if rounds.ended is None else before
            batches.append(own)
        assert len({(loader.state_dict()["epoch"], loader.state_dict()["position"]) for loader in self.loaders}) == 1
        return batches[0][0].epoch, self.rounds[0].ended, batches


def leases_of(draw, num_replicas):
    steps = draw(st.integers(1, 9))
    return Leases(
        steps,
        plan_shares(
            steps * num_replicas, draw(st.lists(st.integers(1, 9), min_size=num_replicas, max_size=num_replicas))
        ),
    )


@examples(60)
@given(data=st.data())
def test_each_sample_is_served_once_over_unequal_rounds_and_restarts_at_other_numbers(split, tmp_path_factory, data):
    ledger = tmp_path_factory.mktemp("ledger")
    samples = data.draw(st.sampled_from([split, Mixture([(split, 1)], epoch_samples=47, block=8)]))
    order, tail = data.draw(st.sampled_from(ORDERS)), data.draw(st.sampled_from(["drop", "short", "pad"]))
    state, reached = None, (0, 0)
    while reached < (2, 0):
        replicas, per_replica, batch_size = (data.draw(st.integers(1, 3)) for _ in range(3))
        world_size = replicas * per_replica
        job = Job(samples, world_size, batch_size, state, order=order, tail=tail, ledger=ledger)
        for _ in range(2):
            job.add(leases_of(data.draw, replicas))
        for _ in range(data.draw(st.integers(1, 8))):
            epoch, found, batches = job.take_round()
            job.add(leases_of(data.draw, replicas))
            positions = sorted(
                position
                for own in batches
                for batch in own
                for position, counts in zip(batch.positions.tolist(), batch.mask.tolist(), strict=True)
                if counts
            )
            assert positions == list(range(found.start, found.stop))
            shares = [found.share_of(rank) for rank in range(world_size)]
            assert [len(own) for own in batches] == shares
        state, reached = job.loaders[0].state_dict(), (epoch, found.stop)
        if data.draw(st.booleans()):  # killed: some ranks were ahead in the next round
            for stream, rounds in zip(job.streams, job.rounds, strict=True):
                for _ in range(data.draw(st.integers(0, 2))):
                    next(stream)
                    if rounds.ended is not None:
                        break
        for loader in job.loaders:
            loader.close()
    result = audit([list(read_ledger(ledger))])
    assert result.epochs[0].is_proven, result
    assert result.epochs[1].is_proven or not result.epochs[1].is_finished, result
    assert not result.epochs[1].repeated.count


def test_consecutive_rounds_are_one_record_and_batches_are_prefetched_over_their_border(split, tmp_path):
    job = Job(split, 2, 2, ledger=tmp_path / "ledger", prefetch=2)
    leases = Leases(2, (3, 1))
    job.add(leases), job.add(leases)
    for _ in range(4):
        assert [len(own) for own in job.take_round()[2]] == [3, 1]
        assert all(loader._in_progress for loader in job.loaders)
        assert job.loaders[0].progress == job.loaders[1].progress
        job.add(leases)
    files = list(read_ledger(tmp_path / "ledger"))
    assert [(len(file.records), file.records[0].count) for file in files] == [(1, 24), (1, 8)]
    next(job.streams[0])
    assert job.loaders[0].progress == pytest.approx((32 + 8 / 3) / len(split))
    assert job.loaders[0].state_dict()["position"] == 32
