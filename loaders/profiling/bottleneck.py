"""Finds the bottleneck of a run from the sums over its steps, and advises in words what to change, for `Report`.

The consumer is the thread that calls the loader and uses its batches. Decoding threads run in parallel with it. With
`prefetch` batches in progress, a step takes the longer of two times: the decoding threads' time for a batch, or the
consumer's time for a batch plus the loader's work inside the call. So the bottleneck is found as follows:

- If the consumer spent less than `STARVED_SHARE` of its time waiting, the consumer itself is the bottleneck.
- If most calls waited for other threads, the bottleneck is these threads' stage, however long other stages took.
- Otherwise it is the stage that blocked the calls longest.

The creation of the decoder and of the ledger's file (`Stage.START`) is not counted, because it happens once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from datasvc.loaders.profiling.step_times import Stage, Totals

STARVED_SHARE: Final = 0.05
"""A run counts as starved if it spends at least this fraction of its time waiting."""


@dataclass(frozen=True)
class Resources:
    """Resources and settings of a loader that the advice depends on.

    Attributes:
        unit: unit of the rates, in the plural, such as "images".
        decoder: "cpu", "gpu-window", "gpu-whole" or "pillow"; None if the loader decodes nothing.
        num_threads: number of decoding threads.
        num_processors: number of processors for this rank: those of the process, divided among the node's ranks.
        prefetch: number of batches in progress.
        has_cache: whether shards are read through a node's cache.
        is_shared: whether the loader is a member of a decode group.
        batch_bytes: bytes of a decoded batch, about; 0: threads of the loader make no batches.
        device_id: index of the GPU that has decoded batches; None: the CPU.
    """

    unit: str = "samples"
    decoder: str | None = None
    num_threads: int = 1
    num_processors: int = 1
    prefetch: int = 2
    has_cache: bool = False
    is_shared: bool = False
    batch_bytes: int = 0
    device_id: int | None = None


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck of a run.

    Attributes:
        stage: the stage that the consumer waits for; None if the consumer itself is the bottleneck.
        offered: samples per second that the loader handed over, including waits.
        asked: samples per second that the consumer would have taken without waits; None if it took no time itself.
        starved_share: fraction of the time that the consumer waited.
        headroom: fraction by which the rate of the consumer could rise before the loader limits it; None if unknown.
        advice: measures that help; "" if nothing is wrong.
        unit: unit of the rates, in the plural.
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
        if self.headroom is not None and self.headroom > _MAX_HEADROOM:
            headroom = f", more than {_MAX_HEADROOM:,.0%} headroom"  # measured in microseconds: the digits are noise
        return (
            f"not starved: the consumer is the limit{headroom}; it takes {self.offered:,.0f} {self.unit}/s and waits "
            f"{self.starved_share:.1%} of the time"
        )


def diagnose(totals: Totals, resources: Resources) -> Bottleneck:
    """Return the bottleneck of a run from the sums over its steps."""
    wait_s = totals.wait_s - totals.blocked_s.get(Stage.START, 0.0)
    total_s = wait_s + totals.consumer_s
    if not total_s:
        return Bottleneck(None, 0.0, None, 0.0, None, "", resources.unit)
    offered = totals.num_samples / total_s
    asked = totals.num_samples / totals.consumer_s if totals.consumer_s else None
    wait_share = wait_s / total_s
    if wait_share < STARVED_SHARE:
        return Bottleneck(None, offered, asked, wait_share, _headroom(totals, wait_s), "", resources.unit)
    stage = _find_stage(totals)
    return Bottleneck(stage, offered, asked, wait_share, None, _advice(stage, totals, resources), resources.unit)


def _find_stage(totals: Totals) -> Stage:
    """Return the stage that limits a starved run."""
    # Other threads work during the stages inside the call. These stages cost nothing if the other threads are slower.
    times_s = totals.waiting_s if is_thread_bound(totals) else totals.blocked_s
    return max((stage for stage in times_s if stage is not Stage.START), key=times_s.__getitem__)


def is_thread_bound(totals: Totals) -> bool:
    """Return whether the calls of most steps waited for other threads."""
    return 2 * totals.num_bound_steps > totals.num_steps


def _headroom(totals: Totals, wait_s: float) -> float | None:
    """Return the headroom of a run that is not starved; None if no work of other threads was timed."""
    # For each stage of other threads: how long it would have taken if its threads had always worked in parallel.
    busy_s = [beside_s / totals.num_beside[stage] for stage, beside_s in totals.beside_s.items()]
    if not busy_s:
        return None
    # The limit for a faster consumer is the slowest of these stages, or the work inside the calls.
    return max(0.0, totals.consumer_s / max(wait_s, *busy_s) - 1)


def _advice(stage: Stage, totals: Totals, resources: Resources) -> str:
    if stage is Stage.DECODE:
        return _decode_advice(totals, resources)
    if stage is Stage.ORIGIN and not resources.has_cache:
        return "read through a node's cache: cache=Cache(FOLDER)"
    return _ADVICE[stage]


def _decode_advice(totals: Totals, resources: Resources) -> str:
    """Return the advice for a run that decoding limits."""
    if resources.is_shared:
        return (
            "the jobs of the decode group decode in turn: give each of them more threads, "
            "decode=DecodeConfig(num_threads=N)"
        )
    # Some calls waited for the decoding threads, but most did not: the threads are fast enough on average.
    if not is_thread_bound(totals) and totals.num_bound_steps:
        setting = f"prefetch={2 * resources.prefetch or 2}"
        if resources.decoder is not None:
            setting = f"decode=DecodeConfig({setting})"
        return f"some batches take longer than others: use {setting} to even that out"
    if resources.decoder is None:
        return "use larger batches, which cost less per sample"
    if resources.decoder.startswith("gpu"):
        return "compare decode='cpu', or store smaller images"
    other = "GPU decode" if resources.decoder == "cpu" else "decode='cpu', with DALI"
    num_free = resources.num_processors - resources.num_threads
    if num_free <= 0:
        return f"all {resources.num_processors} processors decode already: {other}, or smaller images"
    num_missing = _missing_threads(totals, resources.num_threads)
    if num_missing > num_free:
        return f"{_threads(num_free)}, though {resources.num_processors} processors are too few: {other}"
    return f"{_threads(num_missing)} or {other}"


def _missing_threads(totals: Totals, num_threads: int) -> int:
    """Return how many more threads the consumer needs, if the speed of decoding is proportional to their number."""
    # Now decoding a batch takes the consumer's time plus its wait. It must take no longer than the consumer's time.
    num_missing = num_threads * totals.blocked_s[Stage.DECODE] / max(totals.consumer_s, _ROUNDING)
    return max(1, math.ceil(num_missing - _ROUNDING))


def _threads(number: int) -> str:
    count = _NUMBERS[number] if number < len(_NUMBERS) else str(number)
    return f"{count} more decode thread{'' if number == 1 else 's'}"


_MAX_HEADROOM: Final = 10.0
_ROUNDING: Final = 1e-6  # tolerance: a rounding error must not add a thread, and no division may be by zero
_NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ADVICE: Final[Mapping[Stage, str]] = {
    Stage.ORIGIN: "stage the version before the run (datasvc stage), or give the cache room for all of it",
    Stage.PEER: "stage the version on this node before the run, or check the network between the nodes",
    Stage.CACHE: "put the cache on a faster disk, or make larger shards, so that fewer are opened",
    Stage.READ: "use larger batches, and leave out columns that are not needed",
    Stage.COLLATE: "use uint8 batches, and normalise them on the device",
    # Not advised: uint8 or page-locked memory. Images always go to a GPU as bytes, from page-locked memory.
    Stage.TRANSFER: "decode on the GPU, decode='gpu', which copies the encoded images, or use a smaller size=",
    Stage.LEDGER: "put the ledger on a faster disk, or use larger batches, because each batch is one write",
    Stage.LOADER: "use larger batches, because each call costs about the same",
}
