"""Leases: the runs of positions that replicas of unequal speed read in a round. Pure functions.

A round is a block of consecutive positions of an epoch, of whole global batches. It is divided into one run for each
data rank, in the order of the ranks, and a run has as many batches as the share of the rank's replica. Each rank
reads its run in order, one batch in a step, so a rank with a small share makes fewer steps. After the round, the
positions consumed are those before its end, as without leases. The last round of an epoch has the global batches that
are left; samples that do not fill a global batch are no part of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from datasvc.keyed_random import Integers

_GAIN: Final = 1.1
"""Shares change only if the round then takes so many times less: measured speeds vary from round to round."""


@dataclass(frozen=True)
class Round:
    """The positions [start, stop) of an epoch, as they are divided in one round.

    Attributes:
        start: first position.
        stop: position after the last.
        shares: for each replica, the batches of each of its data ranks.
        batch_size: samples of a batch of a data rank.
        ranks: number of data ranks.
    """

    start: int
    stop: int
    shares: tuple[int, ...]
    batch_size: int
    ranks: int

    @property
    def num_steps(self) -> int:
        """Steps of the replica with the most batches."""
        return max(self.shares)

    def share_of(self, rank: int) -> int:
        """Return the number of batches of a data rank."""
        return self.shares[rank // (self.ranks // len(self.shares))]

    def batch_of(self, rank: int, number: int) -> range:
        """Return the positions of a batch of a data rank, by its number in the run; empty if the run has ended."""
        replica, within = divmod(rank, self.ranks // len(self.shares))
        before = sum(self.shares[:replica]) * (self.ranks // len(self.shares)) + self.shares[replica] * within
        start = self.start + (before + min(number, self.shares[replica])) * self.batch_size
        return range(start, start + self.batch_size * (number < self.shares[replica]))


@dataclass(frozen=True)
class Leases:
    """How consecutive rounds are divided.

    Attributes:
        steps: global batches of a round; the last one of an epoch may have fewer.
        shares: for each replica, the batches of each of its data ranks in a round, at least 1; together `steps` times
            the number of replicas.

    Raises:
        ValueError: the shares do not have this sum, or one is below 1.
    """

    steps: int
    shares: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.shares, default=0) < 1 or sum(self.shares) != self.steps * len(self.shares):
            raise ValueError(f"shares of {list(self.shares)} batches in rounds of {self.steps} global batches")

    def to_dict(self) -> dict[str, Any]:
        """Return the leases as JSON values."""
        return {"steps": self.steps, "shares": list(self.shares)}

    @classmethod
    def from_dict(cls, leases: Mapping[str, Any]) -> Leases:
        """Return the leases of a `to_dict` result. Raises TypeError, KeyError or ValueError: it has another form."""
        numbers = [leases["steps"], *leases["shares"]]
        if any(type(number) is not int for number in numbers):
            raise TypeError(f"leases {leases!r} are not integers")
        return cls(numbers[0], tuple(numbers[1:]))

    def of(self, steps: int) -> Leases:
        """Return the leases of rounds of so many global batches, in the same proportion."""
        return self if steps == self.steps else Leases(steps, plan_shares(steps * len(self.shares), self.shares))

    def next_round(self, position: int, num_samples: int, batch_size: int, ranks: int) -> Round | None:
        """Return the round that starts at a position of an epoch; None if no whole global batch is left.

        Args:
            position: number of samples of the epoch before the round.
            num_samples: samples of an epoch.
            batch_size: samples of a batch of a data rank.
            ranks: number of data ranks, a multiple of the number of shares.
        """
        steps = min(self.steps, (num_samples - position) // (batch_size * ranks))
        if not steps:
            return None
        stop = position + steps * batch_size * ranks
        return Round(position, stop, self.of(steps).shares, batch_size, ranks)

    def count_steps(self, num_batches: int) -> int:
        """Return the steps in which so many consecutive global batches of an epoch are consumed."""
        full, left = divmod(num_batches, self.steps)
        return full * max(self.shares) + (max(self.of(left).shares) if left else 0)

    def steps_of(self, offsets: Integers, num_batches: int, batch_size: int, ranks: int) -> Integers:
        """Return the step that consumed each position, counted from 0: `int64[n]`.

        Args:
            offsets: `int64[n]`, distances of the positions from the first round of the epoch.
            num_batches: global batches from there to the end of the epoch. The samples after them have a step more.
            batch_size: samples of a batch of a data rank.
            ranks: number of data ranks.
        """
        batches = np.minimum(offsets // batch_size, num_batches * ranks)  # numbers of batches of data ranks
        full, left = divmod(num_batches, self.steps)
        rounds, within = np.divmod(batches, self.steps * ranks)
        steps: Integers = rounds * max(self.shares)
        for is_here, leases in ((rounds < full, self), (rounds == full, self.of(left) if left else None)):
            if leases is None:
                continue
            # The step in the round is the distance of a batch from the first one of its rank.
            starts = np.cumsum([0, *np.repeat(leases.shares, ranks // len(self.shares))])
            here = is_here & (within < starts[-1])
            steps[here] += within[here] - starts[np.searchsorted(starts, within[here], side="right") - 1]
        steps[batches == num_batches * ranks] = self.count_steps(num_batches)
        return steps

    def round_of_step(
        self, step: int, first: int, num_samples: int, batch_size: int, ranks: int
    ) -> tuple[Round, int] | None:
        """Return the round that has a step, counted from 0 at the position `first`, and the step's number in it.

        None: the epoch has no round with this step; its last samples, which fill no global batch, may have it.
        """
        full = (num_samples - first) // (batch_size * ranks) // self.steps
        number = min(step // max(self.shares), full)
        start = first + number * self.steps * batch_size * ranks
        found = self.next_round(start, num_samples, batch_size, ranks)
        within = step - number * max(self.shares)
        return None if found is None or within >= found.num_steps else (found, within)


def plan_shares(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return whole batches in proportion to speeds, by largest remainder, at least 1 each; they sum to `total`.

    Args:
        total: batches to divide, at least as many as speeds.
        speeds: positive numbers, in any unit.
    """
    assert total >= len(speeds)
    shares = [1] * len(speeds)
    # A share below one batch becomes one batch, and the other shares divide the rest.
    dividing = list(range(len(speeds)))
    while slow := [number for number in dividing if speeds[number] * total < sum(speeds[each] for each in dividing)]:
        dividing = [number for number in dividing if number not in slow]
        total -= len(slow)
    all_speeds = sum(speeds[number] for number in dividing)
    quotas = {number: total * speeds[number] / all_speeds for number in dividing}
    for number in dividing:
        shares[number] = int(quotas[number])
    left = total - sum(shares[number] for number in dividing)
    # Equal remainders go to the first replicas, on every rank alike.
    for number in sorted(dividing, key=lambda each: int(quotas[each]) - quotas[each])[:left]:
        shares[number] += 1
    return tuple(shares)


def choose_shares(total: int, speeds: Sequence[float], previous: Sequence[int]) -> tuple[int, ...]:
    """Return `plan_shares`, or the previous shares of the same total if the new ones gain less than a tenth."""
    planned = plan_shares(total, speeds)
    if len(previous) != len(speeds) or sum(previous) != total:
        return planned
    before_s, after_s = (
        max(share / speed for share, speed in zip(shares, speeds, strict=True)) for shares in (previous, planned)
    )
    return planned if before_s > _GAIN * after_s else tuple(previous)
