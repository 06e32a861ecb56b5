"""Data use of a model version: which split or mixture was read, in which order, and over which spans of positions.

The state of a loader has only the current position, which does not show what was consumed: a run that starts from the
weights of another run may read the same data again. A data use therefore has spans: all positions that the run
consumed since it started from the parent version's weights. Spans start at the parent and not at the previous save,
so a save that fails, or that is not yet committed when the next save starts, leaves no gap.

A training run makes a `ConsumptionTracker`, and passes its data use to each save.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol, cast, runtime_checkable

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.ledger.handed_over import handed_over_since, mark
from datasvc.ledger.leases import Leases
from datasvc.order import Tail, parse_tail

Cursor = tuple[int, int]
"""Epoch and position: all samples of the epoch before the position were served."""

_PURPOSES: Final = ("training", "evaluation")


@dataclass(frozen=True)
class ReadSpan:
    """The positions from `start` to `stop`, which a run consumed with one batch size.

    Attributes:
        start: epoch and position at which the first batch starts.
        stop: epoch and position after the last batch.
        step: number of optimizer steps done at `start`; None: unknown.
        global_batch: samples per step over all ranks; None: unknown.
        tail: treatment of samples that do not fill a global batch; None: unknown.
        ranks: number of data ranks; None: unknown.
        leases: how the rounds of the span were divided among replicas, from `start` on and in each epoch from its
            first position on; None: each step consumed a global batch.
    """

    start: Cursor
    stop: Cursor
    step: int | None = None
    global_batch: int | None = None
    tail: Tail | None = None
    ranks: int | None = None
    leases: Leases | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the span as JSON values; without `ranks` if that is unknown, and without `leases` if it has none."""
        fields = {**asdict(self), "start": list(self.start), "stop": list(self.stop)}
        del fields["leases"]
        if self.ranks is None:
            del fields["ranks"]
        return fields if self.leases is None else {**fields, "leases": self.leases.to_dict()}

    @classmethod
    def from_dict(cls, span: Mapping[str, Any]) -> ReadSpan:
        """Return the span of a `to_dict` result. Raises CorruptDataError: `span` has another form."""
        try:
            start, stop = (_checked_cursor(*span[name]) for name in ("start", "stop"))
            step, global_batch, tail, ranks = (span.get(name) for name in ("step", "global_batch", "tail", "ranks"))
            are_counts = _is_count_or_none(step, 0) and _is_count_or_none(global_batch, 1)
            are_counts = are_counts and _is_count_or_none(ranks, 1)
            if start > stop or not are_counts:
                raise ValueError(f"from {start} to {stop}, step {step!r}, batches of {global_batch!r}")  # noqa: TRY301
            leases = None if span.get("leases") is None else Leases.from_dict(span["leases"])
            if leases is not None and (ranks is None or global_batch is None or ranks % len(leases.shares)):
                raise ValueError(f"leases of {len(leases.shares)} replicas, with {ranks} ranks")  # noqa: TRY301
            return cls(start, stop, step, global_batch, None if tail is None else parse_tail(tail), ranks, leases)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"not a valid span of consumed data: {error}; found {span!r}") from error


@dataclass(frozen=True)
class DataUse:
    """A split or mixture that a run reads, and the run's current position in it; see `ConsumptionTracker.use`.

    Attributes:
        dataset: version of the data set, such as "digits@1"; for a mixture, those of its splits, with commas.
        split: name of the split, such as "train"; for a mixture "mixture".
        state: state of the loader: order, epoch and position.
        purpose: "training", or "evaluation" for data that the weights were not trained on.
        run: random identifier of the run; None: unknown.
        spans: positions that the run consumed, in order; () if they were not recorded.
        loader: settings with which the loader made batches, see `Loader.settings`; None: unknown.
        view: how the samples of a view were chosen, such as "label <> 'cat'", for a mixture with the data set of
            each; None: all samples.
    """

    dataset: str
    split: str
    state: Mapping[str, Any]
    purpose: str = "training"
    run: str | None = None
    spans: Sequence[ReadSpan] = ()
    loader: Mapping[str, Any] | None = None
    view: str | None = None

    def __str__(self) -> str:
        """Return the data by name, such as "digits@1/train[label <> 'cat']"."""
        return use_text({"dataset": self.dataset, "split": self.split, "view": self.view})

    def __post_init__(self) -> None:
        if self.purpose not in _PURPOSES:
            raise ConfigError(f"purpose is {self.purpose!r}; expected one of {', '.join(_PURPOSES)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the use as JSON values; default values are left out."""
        fields: dict[str, Any] = {"dataset": self.dataset, "split": self.split, "state": dict(self.state)}
        if self.purpose != "training":
            fields["purpose"] = self.purpose
        if self.run is not None:
            fields["run"] = self.run
        if self.spans:
            fields["spans"] = [span.to_dict() for span in self.spans]
        if self.loader is not None:
            fields["loader"] = dict(self.loader)
        if self.view is not None:
            fields["view"] = self.view
        return fields

    @classmethod
    def from_dict(cls, use: Mapping[str, Any]) -> DataUse:
        """Return the use of a `to_dict` result of any release. Raises CorruptDataError: `use` has another form."""
        try:
            spans = tuple(map(ReadSpan.from_dict, use.get("spans", ())))
            state = dict(use["state"])
            purpose, run, loader, view = use.get("purpose", "training"), *map(use.get, ("run", "loader", "view"))
            if not isinstance(run, str | None) or not isinstance(loader, Mapping | None):
                raise TypeError(f"run is {run!r}, loader is {loader!r}")  # noqa: TRY301
            return cls(str(use["dataset"]), str(use["split"]), state, purpose, run, spans, loader, view)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError(f"not a valid data use: {error!r}; found {use!r}") from error


def use_text(use: Mapping[str, Any]) -> str:
    """Return the data of a use by name, such as "digits@1/train[label <> 'cat']", for a result of `to_dict`."""
    return f"{use['dataset']}/{use['split']}" + (f"[{use['view']}]" if use.get("view") else "")


@runtime_checkable
class ReadLoader(Protocol):
    """The attributes of a loader that a `ConsumptionTracker` needs; the loaders of datasvc have them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state with epoch and position."""

    @property
    def batch_size(self) -> int:
        """Samples per step on this rank."""

    @property
    def tail(self) -> Tail:
        """Treatment of samples that do not fill a global batch."""

    @property
    def ranks(self) -> Any:
        """Object with `world_size`, the number of data ranks."""

    @property
    def split(self) -> Any:
        """The split or mixture that is read."""


class ConsumptionTracker:
    """Records what a run consumes from a loader: `save(..., data=[tracker.use()])`.

    Make a tracker when the loader is at the position where the run starts: after `load_state_dict` in a resumed run.
    Only the rank that saves needs a tracker. If a process takes its weights from another process and not from a
    version, load the `state_dict` of that process's tracker too. Otherwise the data that was consumed between the
    parent version and the hand-over is not recorded.

    Args:
        loader: loader of the training data; one batch of it, over all ranks, is one optimizer step.
        step: number of optimizer steps that the current weights have had.

    Raises:
        ConfigError: `loader` does not report its position; the loaders of datasvc do.
    """

    def __init__(self, loader: ReadLoader, *, step: int = 0) -> None:
        self._run = secrets.token_hex(8)
        self._spans: list[ReadSpan] = []
        self._leases: Leases | None = None
        self._begin(loader, step)

    def switch_loader(self, loader: ReadLoader, *, step: int) -> None:
        """Continue with another loader at the same position, with another world size or batch size.

        `loader` must be at the position that the current weights have reached, after `step` optimizer steps.
        """
        self._spans.append(self._span(cursor_of(loader.state_dict())))
        self._begin(loader, step)

    def switch_leases(self, leases: Leases, *, step: int) -> None:
        """Record that the batches from here on, after `step` optimizer steps, are of rounds with these leases."""
        if leases != self._leases:
            last = self._span(cursor_of(self._loader.state_dict()))
            self._spans += [last] if last.start < last.stop else []
            self._start, self._step, self._leases = last.stop, step, leases

    def end_broken_round(self, *, step: int, global_batch: int, ranks: int) -> None:
        """Record that the batches up to here, after `step` optimizer steps, were planned with other numbers."""
        span = replace(self._span(cursor_of(self._loader.state_dict())), global_batch=global_batch, ranks=ranks)
        self._spans.append(span)
        self._start, self._step = span.stop, step

    def state_dict(self, stop: Cursor | None = None) -> dict[str, Any]:
        """Return the data consumed so far as JSON values, for a process that takes over the current weights.

        `stop`: return what was consumed up to there. Raises ConfigError: see `use`.
        """
        spans = self._all_spans(stop or cursor_of(self._loader.state_dict()))
        return {"run": self._run, "spans": [span.to_dict() for span in spans]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the record of another process, in a process that has taken over its weights.

        Save the next version with the parent that the other process would use.

        Args:
            state: `state_dict` of the other process, from the same moment as the weights and the loader's state.

        Raises:
            CorruptDataError: `state` is not the state of a tracker.
            ConfigError: the position of the loader is not the position that the other process had reached.
        """
        try:
            run, spans = state["run"], [ReadSpan.from_dict(span) for span in state["spans"]]
            stop = spans[-1].stop  # `state_dict` always has a span
        except (KeyError, TypeError, IndexError) as error:
            raise CorruptDataError(f"not a state of a ConsumptionTracker: {error!r}; found {state!r}") from error
        if stop != self._start:
            raise ConfigError(
                f"the loader is at {self._start} (epoch, position), but the consumed data ends at {stop}: load the "
                "loader's state of the same moment first, then make the ConsumptionTracker"
            )
        self._run, self._spans = str(run), spans

    def use(self) -> DataUse:
        """Return the data consumed so far. Raises ConfigError: the loader is before the first position of the run.

        The signal of the loader is written first. Raises UnavailableError: the store does not take it.
        """
        # A save is preceded by the values of all samples that it counts as consumed.
        if (signals := getattr(self._loader, "signals", None)) is not None:
            signals.flush()
        # Leave out the decoder settings: they do not change which samples are read. The loader's own state has them.
        state = {name: value for name, value in self._loader.state_dict().items() if name != "decode"}
        read = self._loader.split
        splits = getattr(read, "splits", None)
        if splits is None:
            dataset, split, view = read.dataset, read.name, read.view
        else:
            dataset, split = ", ".join(dict.fromkeys(part.dataset for part in splits)), "mixture"
            view = ", ".join(f"{part.dataset}: {part.view}" for part in splits if part.view) or None
        spans = self._all_spans(cursor_of(state))
        # A replay of a step makes the same batches with these settings. Loaders of torch have none.
        settings = getattr(self._loader, "settings", None)
        return DataUse(str(dataset), str(split), state, run=self._run, spans=spans, loader=settings, view=view)

    def _begin(self, loader: ReadLoader, step: int) -> None:
        """Start a span at the position of `loader`. Raises ConfigError: see the class."""
        if not isinstance(loader, ReadLoader):
            raise ConfigError(
                f"a {type(loader).__name__} does not report which samples it has served: save without data=, or read "
                "with a loader of datasvc, such as datasvc.loaders.torch.ResumableDataLoader"
            )
        self._loader = loader
        self._start, self._step = cursor_of(loader.state_dict()), step
        self._leases = None

    def _all_spans(self, stop: Cursor) -> tuple[ReadSpan, ...]:
        """Return the spans up to `stop`; without the last one if it has no position and only leases have begun it."""
        last = self._span(stop)
        is_empty = last.start == last.stop and last.leases is not None
        return tuple(self._spans) if is_empty and self._spans else (*self._spans, last)

    def _span(self, stop: Cursor) -> ReadSpan:
        """Return the span from the start of the current loader to `stop`. Raises ConfigError: see `use`."""
        loader = self._loader
        if stop < self._start:
            raise ConfigError(
                f"the loader was reset: it is at {stop} (epoch, position), before {self._start}, where this run "
                "started. If the weights are reset too, make a new ConsumptionTracker after that"
            )
        ranks = loader.ranks.world_size
        return ReadSpan(self._start, stop, self._step, loader.batch_size * ranks, loader.tail, ranks, self._leases)


def cursor_of(state: Mapping[str, Any]) -> Cursor:
    """Return the epoch and position in a loader's state. Raises ConfigError: it has none."""
    try:
        return _checked_cursor(state["epoch"], state["position"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"not a state of a loader: it has the keys {sorted(state)}, but no epoch and position; for a "
            "StatefulDataLoader pass order_state(loader.state_dict())"
        ) from error


def _checked_cursor(epoch: object, position: object) -> Cursor:
    """Return the epoch and position. Raises ValueError: one of them is not an integer of at least 0."""
    are_valid = all(value is not None and _is_count_or_none(value, 0) for value in (epoch, position))
    if not are_valid:
        raise ValueError(f"epoch {epoch!r} and position {position!r} are not both integers of at least 0")
    return cast("Cursor", (epoch, position))


def _is_count_or_none(value: object, least: int) -> bool:
    """Return whether a value is None or an integer of at least `least`."""
    return value is None or (type(value) is int and value >= least)


class RecordedData:
    """The data that a run consumes, from now on.

    Args:
        step: number of optimizer steps that the current weights have had.
        earlier: data uses of these weights since the version that they continue, if that is not their own version.
    """

    def __init__(self, step: int = 0, *, earlier: Sequence[DataUse] = ()) -> None:
        training = [use for use in earlier if use.purpose == "training"]
        self._earlier = {_order_of(use): use for use in training}
        self._run = next((use.run for use in training if use.run is not None), secrets.token_hex(8))
        self._step = step
        self._began = mark()

    def uses(self) -> tuple[DataUse, ...]:
        """Return what was handed over so far, one use for each access order."""
        uses = dict(self._earlier)
        for order, ranges in handed_over_since(self._began).items():
            # Only the first span has a step: batches between spans may have been looked at without a training step.
            spans = tuple(
                ReadSpan(part.start, part.stop, None if index else self._step, part.global_batch, part.tail)
                for index, part in enumerate(ranges)
            )
            state = order.state_at(ranges[-1].stop)
            use = DataUse(order.dataset, order.split, state, run=self._run, spans=spans, view=order.view)
            key = _order_of(use)
            uses[key] = replace(use, spans=_join(uses[key].spans, spans)) if key in uses else use
        return tuple(uses.values())


def _order_of(use: DataUse) -> tuple[object, ...]:
    """Return what the uses of one order have in common."""
    state = {name: value for name, value in use.state.items() if name not in {"epoch", "position"}}
    return use.dataset, use.split, json.dumps(state, sort_keys=True)


def _join(earlier: Sequence[ReadSpan], later: Sequence[ReadSpan]) -> tuple[ReadSpan, ...]:
    """Return all spans; the first of `later` is joined to the last of `earlier` if it continues it."""
    if not earlier or not later:
        return (*earlier, *later)
    last, first = earlier[-1], later[0]
    if last.stop != first.start or (last.global_batch, last.tail) != (first.global_batch, first.tail):
        return (*earlier, *later)
    return (*earlier[:-1], replace(last, stop=first.stop), *later[1:])
