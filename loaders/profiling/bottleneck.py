"""What limits a run, in words: judged from sums alone.

A decoder's threads work beside the caller, so with `prefetch` batches under way a step takes the longer of two: what
they need for a batch, or the caller's own time plus what the loader does in the caller's thread. Hence:

- the caller waited for a small share of its time: it is the limit itself;
- most calls had to wait for threads beside: their stage is the limit, however long the other stages took meanwhile;
- otherwise the stage that blocked the calls longest is.

Making the decoder is not counted: it is done once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from datasvc.loaders.profiling.step_times import Stage, Totals

STARVED_SHARE: Final = 0.05
"""Share of the time from which on a run that waits counts as starved."""


@dataclass(frozen=True)
class Resources:
    """What a loader has to work with.

    Attributes:
        unit: what it serves, in the plural.
        decoder: "cpu", "gpu-window", "gpu-whole" or "pillow"; None where nothing is decoded.
        num_threads: that decode.
        num_processors: this rank's share of those that the process may use.
        prefetch: batches under way.
        has_cache: whether shards come through a node's cache.
        is_shared: whether another process decodes, for several jobs.
    """

    unit: str = "samples"
    decoder: str | None = None
    num_threads: int = 1
    num_processors: int = 1
    prefetch: int = 2
    has_cache: bool = False
    is_shared: bool = False


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run.

    Attributes:
        stage: what it waits for; None: nothing, the consumer is the limit.
        offered: samples per second that the loader handed over, waits counted.
        asked: samples per second that the consumer would have taken without a wait; None where it took no time.
        starved_share: of the time, waited.
        headroom: by how much more the consumer could ask, as a share of what it does; None where nobody knows.
        advice: what helps; "" where nothing is wrong.
        unit: of the rates.
    """

    stage: Stage | None
    offered: float
    asked: float | None
    starved_share: float
    headroom: float | None
    advice: str
    unit: str

    def __str__(self) -> str:
        if not self.offered:
            return "nothing was served yet"
        asked = "any number" if self.asked is None else f"{self.asked:,.0f}"
        if self.stage is not None:
            return f"starved by {self.stage}: {self.offered:,.0f} {self.unit}/s offered, {asked} asked; {self.advice}"
        headroom = "" if self.headroom is None else f", {self.headroom:.0%} headroom"
        return (
            f"not starved: the consumer is the limit{headroom}; it takes {self.offered:,.0f} {self.unit}/s and waits "
            f"{self.starved_share:.1%} of the time"
        )


def diagnose(totals: Totals, means: Resources) -> Bottleneck:
    """Return what limits a run.

    Args:
        totals: of its steps.
        means: what the loader has.
    """
    wait_s = totals.wait_s - totals.blocked_s.get(Stage.START, 0.0)
    whole_s = wait_s + totals.consumer_s
    if not whole_s:
        return Bottleneck(None, 0.0, None, 0.0, None, "", means.unit)
    offered = totals.num_samples / whole_s
    asked = totals.num_samples / totals.consumer_s if totals.consumer_s else None
    share = wait_s / whole_s
    if share < STARVED_SHARE:
        return Bottleneck(None, offered, asked, share, _headroom(totals, wait_s), "", means.unit)
    stage = _limit(totals)
    return Bottleneck(stage, offered, asked, share, None, _advice(stage, totals, means), means.unit)


def _limit(totals: Totals) -> Stage:
    """Return the stage that limits a run that waits."""
    if _is_bound(totals):
        return max(totals.waiting_s, key=lambda stage: totals.waiting_s[stage])
    return max(
        (stage for stage in totals.blocked_s if stage is not Stage.START), key=lambda stage: totals.blocked_s[stage]
    )


def _is_bound(totals: Totals) -> bool:
    """Return whether most steps waited for threads that work beside the calls."""
    return 2 * totals.num_bound_steps > totals.num_steps


def _headroom(totals: Totals, wait_s: float) -> float | None:
    """Return what is known where the work beside was timed: the slower of it and of the calls is the next limit."""
    busy_s = [beside_s / totals.num_beside[stage] for stage, beside_s in totals.beside_s.items()]
    if not busy_s:
        return None
    return max(0.0, totals.consumer_s / max(wait_s, *busy_s) - 1)


def _advice(stage: Stage, totals: Totals, means: Resources) -> str:
    if stage is Stage.DECODE:
        return _decode_advice(totals, means)
    if stage is Stage.ORIGIN and not means.has_cache:
        return "read through a node's cache: cache=Cache(FOLDER)"
    return _ADVICE[stage]


def _decode_advice(totals: Totals, means: Resources) -> str:
    if means.is_shared:
        return "one process decodes for all jobs of the decode group: more num_threads for the job that starts it"
    if not _is_bound(totals) and totals.num_bound_steps:
        return f"some batches take longer than others: prefetch={2 * means.prefetch or 2} evens that out"
    if means.decoder is None:
        return "larger batches cost less per sample"
    if means.decoder.startswith("gpu"):
        return "compare decode='cpu', or store smaller images"
    other = "GPU decode" if means.decoder == "cpu" else "decode='cpu', with DALI"
    free = means.num_processors - means.num_threads
    if free <= 0:
        return f"all {means.num_processors} processors decode already: {other}, or smaller images"
    missing = _missing_threads(totals, means.num_threads)
    if missing > free:
        return f"{_threads(free)}, though {means.num_processors} processors are too few: {other}"
    return f"{_threads(missing)} or {other}"


def _missing_threads(totals: Totals, num_threads: int) -> int:
    """Return how many more threads keep up with the consumer, if each does as much as those there are."""
    wanted = num_threads * totals.blocked_s[Stage.DECODE] / max(totals.consumer_s, _ROUNDING)
    return max(1, math.ceil(wanted - _ROUNDING))


def _threads(number: int) -> str:
    count = _NUMBERS[number] if number < len(_NUMBERS) else str(number)
    return f"{count} more decode thread{'' if number == 1 else 's'}"


_ROUNDING: Final = 1e-6
_NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ADVICE: Final[Mapping[Stage, str]] = {
    Stage.ORIGIN: "stage the version before the run (datasvc stage), or give the cache room for all of it",
    Stage.PEER: "stage the version on this node before the run, or look at the network between the nodes",
    Stage.CACHE: "put the cache on a faster disk, or make larger shards: fewer are opened",
    Stage.READ: "larger batches, and columns that are not needed left out",
    Stage.COLLATE: "uint8 batches, normalised on the device",
    Stage.TRANSFER: "uint8 or half batches, in pinned memory; or GPU decode, which needs no copy",
    Stage.LEDGER: "put the ledger on a faster disk, or make larger batches: each is noted by itself",
    Stage.LOADER: "larger batches: each call costs about the same",
}
