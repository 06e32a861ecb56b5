"""What a version's training consumed, as runs of positions of known orders. Pure: no file is read here.

Every version adds a few segments to what the versions that it continues consumed. A segment lies on the grid of one
run's batches, so which positions were dropped at the end of an epoch, and at which step the others were consumed,
follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.models.versions.data_use import Cursor, DataUse, ReadSpan, cursor_of
from datasvc.order import OrderConfig, OrderState, count_steps
from datasvc.repository import Digest
from datasvc.repository.objects.objects import parse_digest

_MIXTURE_FORMAT = 1
_MAX_EPOCHS = 1 << 20


@dataclass(frozen=True)
class Mix:
    """How positions are dealt to the splits of a mixture, see `mix_order`."""

    weights: tuple[int, ...]
    epoch_samples: int
    block: int


@dataclass(frozen=True)
class ReadOrder:
    """What, with an epoch, determines which sample is at which position. Equal where the same samples are.

    Attributes:
        tables: digests of the shard tables of its splits; one without a mixture.
        config: of the access order.
        mix: None: one split alone.
        names: of the splits, "digits@1/train".
    """

    tables: tuple[Digest, ...]
    config: OrderConfig
    mix: Mix | None = None
    names: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Segment:
    """What a version consumed of one order, and its ancestors did not.

    Attributes:
        order: in which it was read.
        span: of the run that read it; its batches begin at the span's start.
        since: where the version's own part begins: what is before it in the span was consumed by an ancestor.
        stop_step: optimizer steps behind the weights at the span's end; None: not known.
    """

    order: ReadOrder
    span: ReadSpan
    since: Cursor
    stop_step: int | None = None


class EpochPart(NamedTuple):
    """What of one epoch a segment covers.

    Attributes:
        epoch: counted from 0.
        start: first position.
        stop: half-open end.
        first: where the batches of this epoch begin; `start` or before.
        step: optimizer steps before the batch at `first`; None: not known.
        global_batch: samples of a step; None: not known.
        is_certain: False where the last positions may have been dropped, because nobody wrote down what becomes of
            them.
    """

    epoch: int
    start: int
    stop: int
    first: int
    step: int | None
    global_batch: int | None
    is_certain: bool

    def steps_of(self, positions: Integers) -> Integers | None:
        """Return the step that consumed each position, counted from 1: the weights of that step have it."""
        if self.step is None or self.global_batch is None:
            return None
        steps: Integers = self.step + 1 + (positions - self.first) // self.global_batch
        return steps


def parse_use(use: DataUse) -> tuple[ReadOrder, Cursor]:
    """Return in which order a use was read, and where it stands.

    Raises:
        ConfigError: its state is none of a loader, or one of a later format.
    """
    state = use.state
    if "mixture_format" in state:
        return _parse_mixture(state), cursor_of(state)
    found = OrderState.from_dict(state)
    order = ReadOrder((parse_digest(found.version),), found.config, names=(f"{use.dataset}/{use.split}",))
    return order, (found.epoch, found.position)


def _parse_mixture(state: Any) -> ReadOrder:
    if state["mixture_format"] != _MIXTURE_FORMAT:
        raise ConfigError(
            f"this state of a mixture has format {state['mixture_format']}; this datasvc reads format "
            f"{_MIXTURE_FORMAT}"
        )
    try:
        mixture = state["mixture"]
        config = OrderConfig(**{name: state[name] for name in OrderConfig.__dataclass_fields__})
        weights = tuple(map(int, mixture["weights"]))
        mix = Mix(weights, int(mixture["epoch_samples"]), int(mixture["block"]))
        tables = tuple(parse_digest(split["version"]) for split in mixture["splits"])
        names = tuple(str(split["name"]) for split in mixture["splits"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"this is no state of a mixture: {error!r}") from error
    if len(weights) != len(tables) or min(weights, default=-1) < 0 or not any(weights) or mix.epoch_samples < 1:
        raise ConfigError(f"this is no state of a mixture: it has the weights {weights} for {len(tables)} splits")
    if any(0 < weight * mix.block < sum(weights) for weight in weights):
        raise ConfigError(f"this is no state of a mixture: blocks of {mix.block} hold none of some split")
    return ReadOrder(tables, config, mix, names)


def own_segments(use: DataUse, before: DataUse | None, *, step: int | None) -> list[Segment]:
    """Return what a version consumed after its nearest ancestor that read the same.

    Args:
        use: of the version.
        before: of that ancestor: made by the same run; or, where the version has no spans, in the same order. None:
            there is none.
        step: optimizer steps behind the version.

    Raises:
        ConfigError: a state is none.
    """
    order, stop = parse_use(use)
    if use.spans:
        return _clip(order, use.spans, before.spans if before is not None else (), step)
    known = (0, 0) if before is None else parse_use(before)[1]
    # Where it stands before its ancestor does, it began anew.
    start = known if known <= stop else (0, 0)
    return [Segment(order, ReadSpan(start, stop), start, step)] if start < stop else []


def _clip(order: ReadOrder, spans: Sequence[ReadSpan], before: Sequence[ReadSpan], step: int | None) -> list[Segment]:
    """Return the spans of a run without those that it had behind it at an earlier version."""
    num_same = 0
    while num_same < min(len(spans), len(before)) and spans[num_same] == before[num_same]:
        num_same += 1
    since = spans[num_same].start if num_same < len(spans) else None
    if num_same < min(len(spans), len(before)) and spans[num_same].start == before[num_same].start:
        # The span grew, or the run was put back and stands before: then nothing of it is new.
        since = min(before[num_same].stop, spans[num_same].stop)
    segments = []
    for number, span in list(enumerate(spans))[num_same:]:
        begin = since if number == num_same and since is not None else span.start
        if begin < span.stop:
            ends = spans[number + 1].step if number + 1 < len(spans) else step
            segments.append(Segment(order, span, begin, ends))
    return segments


def parts_of(segment: Segment, num_samples: int) -> Iterator[EpochPart]:
    """Yield what a segment covers, epoch by epoch.

    Args:
        segment: of a version.
        num_samples: of an epoch.

    Raises:
        ConfigError: it lies outside the epochs' positions, or spans absurdly many.
    """
    span = segment.span
    if max(span.start[1], span.stop[1], segment.since[1]) > num_samples:
        raise ConfigError(f"positions {span.start} to {span.stop} lie outside epochs of {num_samples} samples")
    if span.stop[0] - span.start[0] > _MAX_EPOCHS:
        raise ConfigError(f"{span.start} to {span.stop} are more epochs than any run has")
    step = span.step if _is_counted(segment, num_samples) else None
    for epoch in range(span.start[0], span.stop[0] + 1):
        first = span.start[1] if epoch == span.start[0] else 0
        ends_here = epoch == span.stop[0]
        stop = span.stop[1] if ends_here else _last_served(first, num_samples, span)
        start = max(first, segment.since[1]) if epoch == segment.since[0] else first
        if epoch >= segment.since[0] and start < stop:
            yield EpochPart(epoch, start, stop, first, step, span.global_batch, ends_here or _says_end(span))
        if step is not None and not ends_here:
            step += _steps_to_end(first, num_samples, span)


def _says_end(span: ReadSpan) -> bool:
    """Return whether it is known which positions at the end of an epoch were dropped."""
    return span.tail in {"short", "pad"} or (span.tail == "drop" and span.global_batch is not None)


def _last_served(first: int, num_samples: int, span: ReadSpan) -> int:
    if span.tail != "drop" or span.global_batch is None:
        return num_samples
    return num_samples - (num_samples - first) % span.global_batch


def _steps_to_end(first: int, num_samples: int, span: ReadSpan) -> int:
    assert span.global_batch is not None
    assert span.tail is not None
    return count_steps(first, num_samples, span.global_batch, span.tail)


def _is_counted(segment: Segment, num_samples: int) -> bool:
    """Return whether as many batches as optimizer steps lie in the span: only then does a batch tell its step."""
    span = segment.span
    if span.step is None or segment.stop_step is None or span.global_batch is None or span.tail is None:
        return False
    (epoch, first), (last, stop) = span.start, span.stop
    steps = 0
    if last > epoch:
        steps = _steps_to_end(first, num_samples, span)
        steps += (last - epoch - 1) * _steps_to_end(0, num_samples, span)
        first = 0
    # The last batch of an epoch may be a short or a padded one.
    steps += -(-(stop - first) // span.global_batch)
    return span.step + steps == segment.stop_step


def find_in(part: EpochPart, positions: Integers) -> slice:
    """Return which of ascending positions a part covers."""
    start, stop = np.searchsorted(positions, [part.start, part.stop])
    return slice(int(start), int(stop))


def trainings(uses: Sequence[DataUse]) -> list[DataUse]:
    """Return the uses that weights were made of: not those that they were only evaluated on."""
    return [use for use in uses if use.purpose == "training"]
