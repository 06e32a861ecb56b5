"""Computes the ranges of positions that the training of a version consumed, from its entry. No file is read here.

An entry records spans: ranges of positions, each read with one batch size. A segment is the part of a span that a
version consumed and its ancestors did not. The start and the batch size of a span determine which positions were
dropped at the end of an epoch, and which optimizer step consumed each of the others. If an entry does not record
them, the result is marked as uncertain. The module `segments` combines the segments of a version and its ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.ledger.leases import Leases
from datasvc.mix_schedule import MixSchedule, MixStage, read_stages
from datasvc.models.versions.data_use import Cursor, DataUse, ReadSpan, cursor_of
from datasvc.order import OrderConfig, OrderState, Tail, count_steps
from datasvc.printable import count_text
from datasvc.repository import Digest
from datasvc.repository.objects.objects import parse_digest

_MIXTURE_FORMAT = 2  # format 1 has no stages
_MAX_EPOCHS = 1 << 20  # of one segment; without a limit, an invalid entry could cause an almost endless loop


@dataclass(frozen=True)
class Mix:
    """Parameters of a mixture, which determine the split of each position; for the fields see `MixOrder`."""

    weights: tuple[int, ...]
    epoch_samples: int
    block: int
    stages: tuple[MixStage, ...] = ()


@dataclass(frozen=True)
class ReadOrder:
    """Order in which a loader reads: with an epoch number, it determines the sample at each position.

    Attributes:
        tables: digests of the shard tables of the splits; without a mixture there is one.
        config: parameters of the access order.
        mix: weights of the mixture; None for a single split.
        names: names of the splits, such as "digits@1/train". Not compared: orders that differ only in names serve
            the same samples.
    """

    tables: tuple[Digest, ...]
    config: OrderConfig
    mix: Mix | None = None
    names: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Segment:
    """Range of positions of one read order that a version consumed and its ancestors did not.

    Attributes:
        order: order in which the samples were read.
        span: span of the run that contains the range; the first batch of the span starts at `span.start`.
        own_start: epoch and position at which the range starts. An ancestor consumed the part of
            the span before it. The range ends at `span.stop`.
        stop_step: number of optimizer steps at the end of the span; None if unknown.
    """

    order: ReadOrder
    span: ReadSpan
    own_start: Cursor
    stop_step: int | None = None


class EpochPart(NamedTuple):
    """Part of one epoch that a segment covers.

    Attributes:
        epoch: number of the epoch, counted from 0.
        start: first position of the part.
        stop: first position after the part.
        first: position at which the batches of this epoch start; at most `start`.
        step: number of optimizer steps before the batch at `first`; None if unknown.
        global_batch: number of samples of a step over all ranks; None if unknown.
        is_certain: False if it is unknown whether the last positions were dropped, because the entry does not record
            how the run treated an incomplete last batch.
        num_samples: number of samples of the epoch.
        ranks: number of data ranks; None if unknown.
        leases: how the rounds from `first` on were divided; None if each step consumed a global batch.
    """

    epoch: int
    start: int
    stop: int
    first: int
    step: int | None
    global_batch: int | None
    is_certain: bool
    num_samples: int
    ranks: int | None = None
    leases: Leases | None = None

    def steps_of(self, positions: Integers) -> Integers | None:
        """Return the optimizer step that consumed each position, counted from 1; None if unknown."""
        if self.step is None or self.global_batch is None:
            return None
        offsets = positions - self.first
        steps: Integers = offsets // self.global_batch
        if self.leases is not None and self.ranks is not None:
            num_batches = (self.num_samples - self.first) // self.global_batch
            steps = self.leases.steps_of(offsets, num_batches, self.global_batch // self.ranks, self.ranks)
        return self.step + 1 + steps


def parse_use(use: DataUse) -> tuple[ReadOrder, Cursor]:
    """Return the read order of a data use, and the position that it has reached.

    Raises:
        ConfigError: the state is not that of a loader, or has a format that this version does not support.
    """
    state = use.state
    if "mixture_format" in state:
        return _parse_mixture(state), cursor_of(state)
    parsed = OrderState.from_dict(state)
    order = ReadOrder((parse_digest(parsed.version),), parsed.config, names=(f"{use.dataset}/{use.split}",))
    return order, (parsed.epoch, parsed.position)


def _parse_mixture(state: Any) -> ReadOrder:
    """Return the read order in the state of a loader of a mixture. Raises ConfigError, see `parse_use`."""
    if state["mixture_format"] not in (1, _MIXTURE_FORMAT):
        raise ConfigError(
            f"the state of a mixture has format {state['mixture_format']}; this datasvc reads the formats 1 and "
            f"{_MIXTURE_FORMAT}: upgrade it"
        )
    try:
        mixture = state["mixture"]
        config = OrderConfig(**{name: state[name] for name in OrderConfig.__dataclass_fields__})
        weights = tuple(map(int, mixture["weights"]))
        stages = tuple(read_stages(mixture)[1:]) if mixture.get("stages") else ()
        mix = Mix(weights, int(mixture["epoch_samples"]), int(mixture["block"]), stages)
        tables = tuple(parse_digest(split["version"]) for split in mixture["splits"])
        names = tuple(str(split["name"]) for split in mixture["splits"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the state of a mixture is not valid: {error!r}") from error
    if len(weights) != len(tables) or min(weights, default=-1) < 0 or not any(weights) or mix.epoch_samples < 1:
        raise ConfigError(
            f"the state of a mixture is not valid: it has the weights {weights} for "
            f"{count_text(len(tables), 'split')}, and epochs "
            f"of {count_text(mix.epoch_samples, 'sample')}"
        )
    # `MixOrder` needs at least one sample of each split with a weight in every block.
    if any(0 < weight * mix.block < sum(weights) for weight in weights):
        raise ConfigError(
            f"the state of a mixture is not valid: with the weights {weights}, a block of "
            f"{count_text(mix.block, 'sample')} has no "
            "sample of one of the splits"
        )
    if stages:
        MixSchedule([MixStage(0, weights), *stages], mix.block)  # checks the same of the later weights
    return ReadOrder(tables, config, mix, names)


def own_segments(use: DataUse, earlier: DataUse | None, *, step: int | None) -> list[Segment]:
    """Return the segments that a version consumed after its nearest ancestor with the same order.

    Args:
        use: data use of the version.
        earlier: data use of that ancestor, or None; it must be of the same run if `use` has spans.
        step: number of optimizer steps of the version's weights; None if unknown.

    Raises:
        ConfigError: a state is not that of a loader.
    """
    order, stop = parse_use(use)
    # Spans record each part of the run; without them, the state gives only the final position.
    if use.spans:
        return _new_segments(order, use.spans, () if earlier is None else earlier.spans, step)
    earlier_stop = (0, 0) if earlier is None else parse_use(earlier)[1]
    # If the position is before that of the ancestor, the run has started again from the first epoch.
    start = earlier_stop if earlier_stop <= stop else (0, 0)
    return [Segment(order, ReadSpan(start, stop), start, step)] if start < stop else []


def _new_segments(
    order: ReadOrder, spans: Sequence[ReadSpan], ancestor_spans: Sequence[ReadSpan], step: int | None
) -> list[Segment]:
    """Return segments for `spans`, without `ancestor_spans`, which an ancestor of the same run recorded."""
    # Both record the run from its beginning, so the first spans are the same in both.
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(spans, ancestor_spans, strict=False)))
    new_spans = spans[num_same:]
    starts = [span.start for span in new_spans]
    if new_spans and num_same < len(ancestor_spans) and new_spans[0].start == ancestor_spans[num_same].start:
        # The first new span starts like a span of the ancestor, but ends elsewhere. If it is longer, only the added
        # part is new. If it is shorter, because the run was reset to a position within it, nothing is new.
        starts[0] = min(ancestor_spans[num_same].stop, new_spans[0].stop)
    # A span ends at the step at which the next one starts. The last span ends at the version's step.
    stop_steps = [*(span.step for span in spans[1:]), step][num_same:]
    return [
        Segment(order, span, start, stop_step)
        for span, start, stop_step in zip(new_spans, starts, stop_steps, strict=True)
        if start < span.stop
    ]


def parts_of(segment: Segment, num_samples: int) -> Iterator[EpochPart]:
    """Yield the parts of a segment, one per epoch of `num_samples` samples. Cursors are pairs: (epoch, position).

    Raises:
        ConfigError: a position is outside the epoch, or the segment has more than `_MAX_EPOCHS` epochs.
    """
    span = segment.span
    if max(span.start[1], span.stop[1], segment.own_start[1]) > num_samples:
        raise ConfigError(
            f"the range from (epoch, position) {span.start} to {span.stop} exceeds epochs of "
            f"{count_text(num_samples, 'sample')}"
        )
    if span.stop[0] - span.start[0] > _MAX_EPOCHS:
        raise ConfigError(
            f"the range from (epoch, position) {span.start} to {span.stop} has more than {_MAX_EPOCHS} epochs"
        )
    # The step of a position is known only if every step consumed one batch.
    step = span.step if _has_batch_per_step(segment, num_samples) else None
    for epoch in range(span.start[0], span.stop[0] + 1):
        first = span.start[1] if epoch == span.start[0] else 0
        ends_here = epoch == span.stop[0]
        stop = span.stop[1] if ends_here else _stop_of_batches(first, num_samples, span)
        # The batches of this epoch start at `first`, the version's own part at `start`.
        start = max(first, segment.own_start[1]) if epoch == segment.own_start[0] else first
        # An ancestor consumed the epochs before `own_start`. Here they only advance the step.
        if epoch >= segment.own_start[0] and start < stop:
            is_certain = ends_here or _has_known_tail(span)
            yield EpochPart(
                epoch, start, stop, first, step, span.global_batch, is_certain, num_samples, span.ranks, span.leases
            )
        if step is not None and not ends_here:
            step += _steps_to_end(first, num_samples, span)


def _has_known_tail(span: ReadSpan) -> bool:
    """Return whether it is known which positions at the end of an epoch were dropped, if any."""
    return span.tail in {"short", "pad"} or (span.tail == "drop" and span.global_batch is not None)


def _stop_of_batches(first: int, num_samples: int, span: ReadSpan) -> int:
    """Return the position after the last batch of an epoch whose batches start at `first`.

    If it is unknown whether samples were dropped, assume that they were not; `EpochPart.is_certain` is then False.
    """
    if span.tail != "drop" or span.global_batch is None:
        return num_samples
    return num_samples - (num_samples - first) % span.global_batch


def _steps_to_end(first: int, num_samples: int, span: ReadSpan) -> int:
    """Return the number of optimizer steps from position `first` to the end of its epoch."""
    assert span.tail is not None
    return _count_steps(num_samples - first, span, span.tail)


def _count_steps(num_positions: int, span: ReadSpan, tail: Tail) -> int:
    """Return the number of optimizer steps that consume consecutive positions, from the start of a round on."""
    assert span.global_batch is not None
    num_batches = num_positions // span.global_batch
    in_rounds = num_batches if span.leases is None else span.leases.count_steps(num_batches)
    return in_rounds + count_steps(num_batches * span.global_batch, num_positions, span.global_batch, tail)


def _has_batch_per_step(segment: Segment, num_samples: int) -> bool:
    """Return whether it is known that each optimizer step of the span consumed one batch."""
    span = segment.span
    if span.step is None or segment.stop_step is None or span.global_batch is None or span.tail is None:
        return False
    (first_epoch, start), (last_epoch, stop) = span.start, span.stop
    num_batches = 0
    # Count the batches: the rest of the first epoch, the whole epochs after it, and the start of the last epoch.
    if last_epoch > first_epoch:
        num_batches = _steps_to_end(start, num_samples, span)
        num_batches += (last_epoch - first_epoch - 1) * _steps_to_end(0, num_samples, span)
        start = 0
    # The last batch of an epoch may be short or padded.
    num_batches += _count_steps(stop - start, span, "short")
    return span.step + num_batches == segment.stop_step


def find_in(part: EpochPart, positions: Integers) -> slice:
    """Return the slice of ascending `positions` that a part covers."""
    start, stop = np.searchsorted(positions, [part.start, part.stop])
    return slice(int(start), int(stop))


def training_uses(uses: Sequence[DataUse]) -> list[DataUse]:
    """Return the data uses of training, without those of evaluation."""
    return [use for use in uses if use.purpose == "training"]
