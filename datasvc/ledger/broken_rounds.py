"""Broken rounds: what is left of an averaging round when a replica is lost, and who trains on it. Pure functions.

Replicas that average their weights train alone for a round: a block of consecutive positions of an epoch. If one is
lost in it, the others keep what they have learned. The positions of the round that no remaining weights have learned
from are divided among the replicas, and trained in a few more steps before the round ends. Invariant: each position
of the round is learned from once, and the positions consumed after it are those before its end, as after any round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.order import Step, slice_step


@dataclass(frozen=True)
class RoundPart:
    """What a replica has applied of a round.

    Attributes:
        epoch: epoch of the round.
        start: its first position.
        num_steps: its global batches, as it was planned.
        global_batch: samples of each of these.
        ranks: number of data ranks as it was planned.
        applied: `int64[n]` ascending, positions that the weights of the replica have learned from in the round.
    """

    epoch: int
    start: int
    num_steps: int
    global_batch: int
    ranks: int
    applied: Integers

    @property
    def stop(self) -> int:
        """Position after the last one of the round."""
        return self.start + self.num_steps * self.global_batch

    def with_steps(self, num_steps: int, ranks: Sequence[int], *, lanes: int = 1) -> RoundPart:
        """Return the part with the first steps of the round, as these data ranks have applied them."""
        first = Step(self.start, self.start + self.global_batch, self.stop)
        parts = [slice_step(first, rank=rank, world_size=self.ranks, lanes=lanes)[0] for rank in ranks]
        offsets = np.arange(num_steps, dtype=np.int64) * self.global_batch
        return replace(self, applied=np.sort((np.concatenate(parts)[None, :] + offsets[:, None]).ravel()))


@dataclass(frozen=True)
class PickedStep(Step):
    """A batch of any positions of a round; `start` and `stop` are the range that they are in.

    Attributes:
        positions: `int64[n]`, positions of the batch.
        before: low-water mark of the job before this batch: the start of the round.
        after: low-water mark after it: the start of the round, and after the last batch the end.
    """

    positions: Integers
    before: int
    after: int

    @property
    def position(self) -> int:
        """Position in the epoch before this step."""
        return self.before

    @property
    def next_position(self) -> int:
        """Position in the epoch after this step."""
        return self.after


@dataclass(frozen=True)
class RestOfRound:
    """What a data rank trains on before a broken round ends.

    Attributes:
        start: first position of the round.
        stop: position after its last one.
        carried: `int64[n]` ascending, positions that this rank records as applied before the loss.
        batches: its batches: `int64[n]` each, of at most the usual size; a single one without positions if nothing is
            left for it. Ranks of a replica have equally many, of equal sizes.
        num_applied: positions of the round that all replicas had applied before.
    """

    start: int
    stop: int
    carried: Integers
    batches: Sequence[Integers]
    num_applied: int


class RestQueue:
    """The batches of the rest of a round that a loader has not handed over yet, in an epoch of so many samples.

    Attributes:
        left: steps that are left.
    """

    max_steps = 0  # for `Loader._batches_at_once`: no rank reads into the next round while another is in this one

    def __init__(self, rest: RestOfRound, num_samples: int) -> None:
        self._rest = rest
        last = len(rest.batches) - 1
        self.left = [
            PickedStep(
                int(positions[0]) if len(positions) else rest.start,
                int(positions[-1]) + 1 if len(positions) else rest.start,
                num_samples,
                positions,
                rest.start,
                rest.stop if number == last else rest.start,
            )
            for number, positions in enumerate(rest.batches)
        ]

    def begin(self, _cursor: object) -> None:
        """Forget the batches."""
        self.left = []

    def hand_over(self) -> None:
        """Count a batch that was handed over."""
        del self.left[:1]

    @property
    def num_ahead(self) -> float:
        """Applied samples of the round, if other ranks have come as far; 0 after it."""
        rest = self._rest
        not_applied = rest.stop - rest.start - rest.num_applied
        return rest.stop - rest.start - not_applied * len(self.left) / len(rest.batches) if self.left else 0.0


@dataclass(frozen=True)
class CatchUpPlan:
    """How the rest of a round is divided.

    Attributes:
        rests: part of each data rank. The ranks of a replica follow each other.
        samples: for each replica, the positions of the round that only its weights stand for: those that it applied
            before, unless an earlier replica has them too, and those of its batches. They add up to the round.
    """

    rests: Sequence[RestOfRound]
    samples: Sequence[int]


def plan_catch_up(parts: Sequence[RoundPart], *, batch_size: int, ranks_per_replica: int) -> CatchUpPlan:
    """Divide what no replica has applied of a round into as few batches as possible, and these among the replicas.

    The batches have equal sizes. If there are fewer batches than replicas, the last replicas get none: smaller ones
    could have a single sample, which batch normalisation can refuse.

    A replica that is new has taken over the weights of another one, and with them what these had learned. The first
    replica of those with a position counts it.

    Args:
        parts: what each replica has applied of one round.
        batch_size: largest batch of a data rank.
        ranks_per_replica: data ranks of a replica.
    """
    start, stop = parts[0].start, parts[0].stop
    is_left = np.ones(stop - start, np.bool_)
    carried = []
    for part in parts:
        own = part.applied[is_left[part.applied - start]]
        is_left[own - start] = False
        carried.append(own)
    left = np.flatnonzero(is_left) + start
    # Each replica had whole steps, so its ranks can have batches of equal sizes, which layouts need.
    assert len(left) % ranks_per_replica == 0, "a replica has applied a part of a step"
    rows = left.reshape(-1, ranks_per_replica)
    batches = np.array_split(rows, max(1, -(-len(rows) // batch_size)))
    rests, samples = [], []
    for own, numbers in zip(carried, np.array_split(np.arange(len(batches)), len(parts)), strict=True):
        of_replica = [batches[number] for number in numbers] or [rows[:0]]
        samples.append(len(own) + sum(batch.size for batch in of_replica))
        for rank in range(ranks_per_replica):
            recorded = own if rank == 0 else own[:0]
            of_rank = [np.split(batch.ravel(), ranks_per_replica)[rank] for batch in of_replica]
            rests.append(RestOfRound(start, stop, recorded, of_rank, stop - start - len(left)))
    return CatchUpPlan(rests, samples)
