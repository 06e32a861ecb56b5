"""What is known of a loader's steps: their stages, single steps and spans, and sums over them. Values only.

A step is one call for a batch and what the caller does with it until the next call. Each moment inside the call
belongs to one stage, the innermost, so the stages of a step sum up to its wait. What other threads do meanwhile, such
as decoding, is kept apart: it costs the caller nothing until it is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

# Asking threads whether they are done takes a while even when they are: a wait counts from this share of its step on.
_BOUND_SHARE: Final = 0.02
_S: Final = 1e-9


class Stage(StrEnum):
    """What a loader's time is spent on."""

    ORIGIN = "origin"  # shards, or samples of them, that are not on this node yet
    PEER = "peer"  # shards that another node gives
    CACHE = "cache"  # opening and releasing shards that are here
    READ = "read"  # planning the batch, views of samples, values of columns
    DECODE = "decode"
    COLLATE = "collate"  # making one batch of decoded samples
    TRANSFER = "transfer"  # host to device
    START = "start"  # making the decoder
    LEDGER = "ledger"  # noting what was served
    LOADER = "loader"  # the rest of the call


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A stretch of one thread's time; shorter ones of that thread may lie in it.

    Attributes:
        name: a stage; "wait" for a whole call, "consumer" for what the caller did until the next one.
        thread: its identifier, as of `threading.get_ident`.
        thread_name: its name then.
        start_ns: by the stopwatch's clock.
        duration_ns: of it.
        step: its number; of work beside the steps, that of the step handed over last.
    """

    name: str
    thread: int
    thread_name: str
    start_ns: int
    duration_ns: int
    step: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step.

    Attributes:
        number: counted from 1 since the loader was made.
        num_samples: that it handed over.
        wait_ns: of the call.
        consumer_ns: from its end to the next call.
        blocked_ns: of each stage inside the call; their sum is `wait_ns`.
        waiting_ns: of each stage, waited inside the call for threads that work beside it.
    """

    number: int
    num_samples: int
    wait_ns: int
    consumer_ns: int
    blocked_ns: Mapping[Stage, int]
    waiting_ns: Mapping[Stage, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """Sums over steps.

    Attributes:
        num_steps: batches handed over.
        num_samples: in those.
        wait_s: inside the calls for them.
        consumer_s: between the calls.
        blocked_s: of each stage that took any inside the calls; their sum is `wait_s`.
        waiting_s: of each stage inside the calls, waited for threads that work beside them.
        beside_s: of each stage in other threads, summed over these.
        num_beside: most threads that were in a stage at the same time.
        num_bound_steps: steps whose call waited for threads that work beside it.
    """

    num_steps: int = 0
    num_samples: int = 0
    wait_s: float = 0.0
    consumer_s: float = 0.0
    blocked_s: Mapping[Stage, float] = field(default_factory=dict)
    waiting_s: Mapping[Stage, float] = field(default_factory=dict)
    beside_s: Mapping[Stage, float] = field(default_factory=dict)
    num_beside: Mapping[Stage, int] = field(default_factory=dict)
    num_bound_steps: int = 0


@dataclass
class Sums:
    """Adds steps up, in whole nanoseconds; attributes as those of `Totals`."""

    num_steps: int = 0
    num_samples: int = 0
    num_bound_steps: int = 0
    wait_ns: int = 0
    consumer_ns: int = 0
    blocked_ns: Counter[Stage] = field(default_factory=Counter)
    waiting_ns: Counter[Stage] = field(default_factory=Counter)
    beside_ns: Counter[Stage] = field(default_factory=Counter)
    num_beside: dict[Stage, int] = field(default_factory=dict)

    def add(
        self,
        num_samples: int,
        wait_ns: int,
        consumer_ns: int,
        blocked_ns: Mapping[Stage, int],
        waiting_ns: Mapping[Stage, int],
    ) -> None:
        """Add a step; arguments as the attributes of `StepTimes`."""
        self.num_steps += 1
        self.num_samples += num_samples
        self.wait_ns += wait_ns
        self.consumer_ns += consumer_ns
        # Counter.update takes several times as long, and this runs every step.
        for stage, duration_ns in blocked_ns.items():
            self.blocked_ns[stage] += duration_ns
        if waiting_ns:
            # Whether threads that work beside the call had not done their part when it came.
            self.num_bound_steps += sum(waiting_ns.values()) > _BOUND_SHARE * (wait_ns + consumer_ns)
            for stage, duration_ns in waiting_ns.items():
                self.waiting_ns[stage] += duration_ns

    def add_beside(self, stage: Stage, duration_ns: int, num_threads: int) -> None:
        """Add work of another thread, and how many were at it then."""
        self.beside_ns[stage] += duration_ns
        self.num_beside[stage] = max(self.num_beside.get(stage, 0), num_threads)

    def plus(self, other: Sums) -> Sums:
        """Return the sums of both."""
        return Sums(
            num_steps=self.num_steps + other.num_steps,
            num_samples=self.num_samples + other.num_samples,
            num_bound_steps=self.num_bound_steps + other.num_bound_steps,
            wait_ns=self.wait_ns + other.wait_ns,
            consumer_ns=self.consumer_ns + other.consumer_ns,
            blocked_ns=self.blocked_ns + other.blocked_ns,
            waiting_ns=self.waiting_ns + other.waiting_ns,
            beside_ns=self.beside_ns + other.beside_ns,
            num_beside={
                stage: max(self.num_beside.get(stage, 0), other.num_beside.get(stage, 0))
                for stage in self.num_beside | other.num_beside
            },
        )

    def totals(self) -> Totals:
        """Return them in seconds."""
        return Totals(
            num_steps=self.num_steps,
            num_samples=self.num_samples,
            wait_s=self.wait_ns * _S,
            consumer_s=self.consumer_ns * _S,
            blocked_s=_seconds(self.blocked_ns),
            waiting_s=_seconds(self.waiting_ns),
            beside_s=_seconds(self.beside_ns),
            num_beside=dict(self.num_beside),
            num_bound_steps=self.num_bound_steps,
        )


def _seconds(times_ns: Mapping[Stage, int]) -> dict[Stage, float]:
    return {stage: value * _S for stage, value in times_ns.items() if value}
