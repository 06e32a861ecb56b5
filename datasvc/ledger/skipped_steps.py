"""Which positions a run masks to skip steps: `--skip 1200-1210`, or `--skip 1205:0-31` for samples of one step.

A skipped step keeps its place: its batch is taken and counted, so all later steps have the batches that they would
have without it. Only the batches from a known cursor on tie steps to positions, so positions are what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.errors import ConfigError
from datasvc.ledger.masked import Cursor, Masked
from datasvc.order import Tail, count_steps

_SKIP: Final = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?(?::(\d{1,18})(?:-(\d{1,18}))?)?", re.ASCII)


@dataclass(frozen=True)
class SkippedSteps:
    """Steps that a run skips.

    Attributes:
        first: first step, counted from 1.
        last: last step, which is skipped too.
        samples: first and last sample of the global batch of each step; None: all of its samples.
    """

    first: int
    last: int
    samples: tuple[int, int] | None = None


def parse_skip(text: str) -> tuple[SkippedSteps, ...]:
    """Return the steps of a text such as "1200-1210,1300,1305:0-31".

    Raises:
        ConfigError: the text has another form, or a range ends before it starts.
    """
    parsed = []
    for part in text.split(","):
        match = _SKIP.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"skip is {text!r}; expected steps such as '1200-1210' or '1200-1210,1300', or samples of the batch "
                "of a step such as '1205:0-31'"
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        samples = None
        if match[3] is not None:
            samples = int(match[3]), int(match[3] if match[4] is None else match[4])
        if first < 1 or last < first or (samples is not None and samples[1] < samples[0]):
            raise ConfigError(f"skip is {text!r}; steps count from 1, and a range ends where it starts or later")
        parsed.append(SkippedSteps(first, last, samples))
    return tuple(parsed)


def up_to(skip: str, step: int) -> str:
    """Return the part of such a text that is about steps up to this one; "" if there is none."""
    kept = []
    for part in skip.split(","):
        match = _SKIP.fullmatch(part.strip())
        assert match is not None, "parse_skip"
        if int(match[1]) <= step:
            samples = part.partition(":")[1] + part.partition(":")[2]
            kept.append(f"{match[1]}-{min(int(match[2] or match[1]), step)}{samples}")
    return ",".join(kept)


@dataclass(frozen=True)
class StepCursor:
    """What ties steps to positions from a cursor on.

    Attributes:
        step: number of steps before the cursor.
        cursor: epoch and position of the next step's batch.
        num_samples: samples of an epoch.
        global_batch: samples of a step over all ranks.
        tail: treatment of samples that do not fill a global batch.
    """

    step: int
    cursor: Cursor
    num_samples: int
    global_batch: int
    tail: Tail

    def ranges(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (step, epoch, start, stop) of the batches of steps `first` to `last`, both after `self.step`."""
        step, (epoch, position) = self.step, self.cursor
        while step < last:
            num_steps = count_steps(position, self.num_samples, self.global_batch, self.tail)
            for number in range(max(first, step + 1), min(last, step + num_steps) + 1):
                start = position + (number - step - 1) * self.global_batch
                yield number, epoch, start, min(start + self.global_batch, self.num_samples)
            step, epoch, position = step + num_steps, epoch + 1, 0

    def step_after(self, num_epochs: int) -> int:
        """Return the last step of a run of so many epochs; `self.step` if it has no epoch left."""
        epoch, position = self.cursor
        if epoch >= num_epochs:
            return self.step
        first, others = (count_steps(each, self.num_samples, self.global_batch, self.tail) for each in (position, 0))
        return self.step + first + (num_epochs - epoch - 1) * others

    def plan_masks(self, skipped: Sequence[SkippedSteps]) -> Masked:
        """Return the positions of steps. Raises ConfigError: a step has fewer samples than are to be skipped."""
        spans = []
        for item in skipped:
            for step, epoch, start, stop in self.ranges(item.first, item.last):
                begin, end = item.samples or (0, stop - start - 1)
                if start + end >= stop:
                    raise ConfigError(
                        f"skip names sample {end} of step {step}, whose batch has the samples 0 to {stop - start - 1}"
                    )
                spans.append((epoch, start + begin, start + end + 1))
        return Masked(tuple(spans))
