"""Rounds in which replicas are lost: the others end them, and learn from each sample once; the ledger proves it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.ledger.audit import audit
from datasvc.ledger.audit_text import describe_counts
from datasvc.ledger.broken_rounds import RestOfRound, RoundPart, plan_catch_up
from datasvc.ledger.file import read_ledger
from datasvc.loaders.core.mixture import Mixture
from tests.examples import examples
from tests.loaders.echo import ORDERS, EchoLoader, open_numbers


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return open_numbers(tmp_path_factory)


class Replicas:
    """The replicas of an attempt in one process, each at its own pace; their weights are the batches they have had.

    Attributes:
        weights: of each replica, the positions of the round that its weights have learned from, each with the number
            of the update.
    """

    num_updates = 0

    def __init__(self, samples, num_replicas, per_replica, start, **options):
        self.per_replica = per_replica
        self.loaders = [
            EchoLoader(samples, rank=rank, world_size=num_replicas * per_replica, **options)
            for rank in range(num_replicas * per_replica)
        ]
        for loader in self.loaders:
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": start})
        self.streams = [iter(loader) for loader in self.loaders]
        self.weights = [set() for _ in range(num_replicas)]

    def step(self, replica):
        for stream in self.streams[replica * self.per_replica :][: self.per_replica]:
            Replicas.num_updates += 1
            self.weights[replica] |= {(int(position), Replicas.num_updates) for position in next(stream).positions}

    def positions(self, replica):
        return np.array(sorted(position for position, _ in self.weights[replica]), np.int64)


@pytest.mark.slow
@examples(100)
@given(data=st.data())
def test_each_sample_is_learned_from_once_whatever_replicas_are_lost_in_a_round_and_its_rest(
    split, tmp_path_factory, data
):
    ledger = tmp_path_factory.mktemp("ledger")
    samples = data.draw(st.sampled_from([split, Mixture([(split, 1)], epoch_samples=57, block=8)]))
    options = {"order": data.draw(st.sampled_from(ORDERS)), "tail": "drop", "ledger": ledger}
    lanes = 1 if isinstance(samples, Mixture) else options["order"].lanes
    per_replica, start, broken = data.draw(st.integers(1, 2)), 0, None
    num_losses = data.draw(st.integers(0, 4))
    while True:
        num_replicas, batch_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        job = Replicas(samples, num_replicas, per_replica, start, batch_size=batch_size, **options)
        if broken is not None:
            part, left = broken
            # Some replicas are left, and others are new and take over the weights of one that is.
            stay = data.draw(st.permutations(range(len(left))))[: data.draw(st.integers(1, num_replicas))]
            job.weights = [set(left[stay[number if number < len(stay) else 0]]) for number in range(num_replicas)]
            parts = [RoundPart(**{**vars(part), "applied": job.positions(number)}) for number in range(num_replicas)]
            plan = plan_catch_up(parts, batch_size=batch_size, ranks_per_replica=per_replica)
            for loader, rest in zip(job.loaders, plan.rests, strict=True):
                loader.read_rest(rest)
            num_batches = [len(rest.batches) for rest in plan.rests[::per_replica]]
            is_broken = num_losses > 0 and data.draw(st.booleans())
            num_losses -= is_broken
            for replica, most in enumerate(num_batches):
                for _ in range(data.draw(st.integers(0, most)) if is_broken else most):
                    assert 0 <= job.loaders[0].progress * samples.num_positions - start <= part.stop - part.start
                    job.step(replica)
            if is_broken:
                broken = part, job.weights
                continue
            check_learned_once(job, part)
            assert sum(plan.samples) == part.stop - part.start
            assert {loader.cursor for loader in job.loaders} == {(0, part.stop)}
            start, broken = part.stop, None
        global_batch, has_begun = batch_size * num_replicas * per_replica, False
        while (num_steps := data.draw(st.integers(1, 4))) * global_batch <= samples.num_positions - start:
            part = RoundPart(0, start, num_steps, global_batch, num_replicas * per_replica, np.empty(0, np.int64))
            job.weights = [set() for _ in range(num_replicas)]
            is_broken = num_losses > 0 and data.draw(st.booleans())
            num_losses -= is_broken
            for replica in range(num_replicas):
                # A rank without a batch leaves no file, which `history` cannot tell from a restart.
                for _ in range(data.draw(st.integers(not has_begun, num_steps)) if is_broken else num_steps):
                    job.step(replica)
            if is_broken:
                for replica, weights in enumerate(job.weights):
                    ranks = range(replica * per_replica, (replica + 1) * per_replica)
                    found = part.with_steps(len(weights) // (batch_size * per_replica), ranks, lanes=lanes)
                    assert found.applied.tolist() == job.positions(replica).tolist()
                broken = part, job.weights
                break
            check_learned_once(job, part)
            start, has_begun = part.stop, True
        if broken is None:
            break
    for stream in job.streams:
        list(stream)
    result = audit([list(read_ledger(ledger))])
    assert result.is_proven, (result.disagreements, result.epochs)


def check_learned_once(job, part):
    """No update of a position is lost, and none was repeated; weights that were copied have the same updates."""
    updates = set().union(*job.weights)
    assert Counter(position for position, _ in updates) == Counter(range(part.start, part.stop))


def test_batches_are_equal_and_steps_few():
    part = RoundPart(0, 8, 5, 12, 6, np.empty(0, np.int64))
    parts = [part.with_steps(num, range(2 * number, 2 * number + 2)) for number, num in ((0, 3), (2, 4))]
    plan = plan_catch_up(parts, batch_size=3, ranks_per_replica=2)
    # 60 samples, of which 12 and 16 were applied: six batches of a replica for 32.
    sizes = [[len(batch) for batch in rest.batches] for rest in plan.rests]
    assert sizes == [[3, 3, 3], [3, 3, 3], [3, 2, 2], [3, 2, 2]]
    assert (plan.samples, plan.rests[0].num_applied) == ([30, 30], 28)
    assert [len(rest.carried) for rest in plan.rests] == [12, 0, 16, 0]


@pytest.mark.parametrize(("num_steps", "batch_size", "sizes"), [(1, 3, [[2], [0], [0]]), (4, 2, [[2, 2], [2], [2]])])
def test_no_batch_has_one_sample_if_none_had_in_the_round(num_steps, batch_size, sizes):
    """The fourth rank, which has batches of 2, is lost in a round of so many steps."""
    part = RoundPart(0, 0, num_steps, 8, 4, np.empty(0, np.int64))
    parts = [part.with_steps(num_steps, [rank]) for rank in range(3)]
    plan = plan_catch_up(parts, batch_size=batch_size, ranks_per_replica=1)
    assert [[len(batch) for batch in rest.batches] for rest in plan.rests] == sizes


def test_a_rank_for_which_nothing_is_left_has_a_batch_without_samples(split):
    part = RoundPart(0, 0, 1, 3, 3, np.array([0, 1]))
    plan = plan_catch_up([part] * 3, batch_size=1, ranks_per_replica=1)
    assert [[batch.tolist() for batch in rest.batches] for rest in plan.rests] == [[[2]], [[]], [[]]]
    loader = EchoLoader(split, batch_size=1, rank=2, world_size=3)
    loader.read_rest(plan.rests[2])
    batches = iter(loader)
    assert (len(next(batches).positions), loader.cursor, next(batches).positions.tolist()) == (0, (0, 3), [5])


def test_what_is_carried_over_must_have_been_served_and_keeps_its_masks(split, tmp_path):
    def read(folder, carried):
        first, second = (
            EchoLoader(split, batch_size=4, rank=0, world_size=1, order=ORDERS[1], tail="drop", ledger=folder)
            for _ in range(2)
        )
        for _, _batch in zip(range(2), first, strict=False):
            pass
        second.read_rest(RestOfRound(0, 12, np.arange(carried), [np.arange(carried, 12)], carried))
        list(second)
        return audit([list(read_ledger(folder))])

    result = read(tmp_path / "served", 8)
    assert result.is_proven
    assert (result.epochs[0].carried, result.epochs[0].again) == (8, 0)
    assert "8 were served before a replica was lost, and the others continued their weights" in describe_counts(
        result.epochs[0]
    )
    invented = read(tmp_path / "invented", 10)
    assert not invented.is_proven
    assert invented.disagreements == ["epoch 0 carries 2 samples over that no file has served"]


def open_loader(split, ledger, rank, world_size, batch_size, position=0):
    """Return a loader and its batches, without those at the end of the epoch that are dropped."""
    options = {"order": ORDERS[1], "tail": "drop", "ledger": ledger}
    loader = EchoLoader(split, batch_size=batch_size, rank=rank, world_size=world_size, **options)
    loader.load_state_dict({**loader.state_dict(), "position": position})
    return loader, iter(loader)


def test_a_restart_at_the_end_of_a_round_that_other_numbers_of_samples_ended_continues_those(split, tmp_path):
    """Rank 1 of two has its part of two steps of 6, then the rest with batches of at most 5, and ends its process."""
    (lost, lost_batches), (left, left_batches) = (open_loader(split, tmp_path, rank, 2, 3) for rank in range(2))
    next(lost_batches)
    part = RoundPart(0, 0, 2, 6, 2, np.concatenate([next(left_batches).positions for _ in range(2)]))
    assert (lost.cursor, left.cursor, part.applied.tolist()) == ((0, 6), (0, 12), [3, 4, 5, 9, 10, 11])
    alone, batches = open_loader(split, tmp_path, 0, 1, 5)
    alone.read_rest(plan_catch_up([part], batch_size=5, ranks_per_replica=1).rests[0])
    assert [next(batches).positions.tolist() for _ in range(2)] == [[0, 1, 2], [6, 7, 8]]
    assert audit([list(read_ledger(tmp_path))]).epochs[0].reached == 12
    list(open_loader(split, tmp_path, 0, 1, 5, 12)[1])
    assert audit([list(read_ledger(tmp_path))]).is_proven


def lose_the_last_of_three(split, ledger):
    """Lose rank 2 in the third of the four steps of 6 of a round; return the loaders and batches of the two left."""
    job = [open_loader(split, ledger, rank, 3, 2) for rank in range(3)]
    for rank, num_steps in enumerate((3, 3, 2)):
        for _ in range(num_steps):
            next(job[rank][1])
    part = RoundPart(0, 0, 4, 6, 3, np.empty(0, np.int64))
    parts = [part.with_steps(3, [rank]) for rank in range(2)]
    plan = plan_catch_up(parts, batch_size=3, ranks_per_replica=1)
    left = [open_loader(split, ledger, rank, 2, 3) for rank in range(2)]
    for (loader, _), rest in zip(left, plan.rests, strict=True):
        loader.read_rest(rest)
    return left


def test_a_restart_in_a_round_continues_those_that_made_its_steps_and_not_its_rest(split, tmp_path):
    """A version is saved after two steps of the round. In its rest all processes end, before any has ended it."""
    next(lose_the_last_of_three(split, tmp_path)[1][1])
    for rank in range(3):
        list(open_loader(split, tmp_path, rank, 3, 2, 12)[1])
    assert audit([list(read_ledger(tmp_path))]).is_proven


def test_only_the_rank_whose_file_is_lost_is_named_if_it_trained_on_the_rest_of_a_round(split, tmp_path):
    for _, batches in lose_the_last_of_three(split, tmp_path):
        list(batches)
    assert audit([list(read_ledger(tmp_path))]).is_proven
    (lost,) = (path for path in tmp_path.iterdir() if "rank1-of-2" in path.name)
    lost.unlink()
    (epoch,) = audit([list(read_ledger(tmp_path))]).epochs
    assert epoch.never.count
    assert epoch.reasons == ["in the attempt of 2 ranks from epoch 0, position 0, on rank 1 left no file"]
