"""What a version says of the data behind it: which split or mixture, in which order, from where to where.

A loader's state says where it stands, not from where it came: a run that begins anew with the weights of another
may read the same data once more. So a use also has spans: all that the run consumed since its weights were those of
the version that it continues. They count from there, not from the version before, so a save that failed, or was not
recorded yet when the next one was made, leaves no hole.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, cast, runtime_checkable

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.order import Tail, parse_tail

Cursor = tuple[int, int]
"""Epoch and position: everything of the epoch before the position was served."""

_PURPOSES: Final = ("training", "evaluation")


@dataclass(frozen=True)
class ReadSpan:
    """What a run read without a change of its batches.

    Attributes:
        start: where it began; the first batch starts here.
        stop: where it stood in the end.
        step: optimizer steps behind the weights at the start; None: not known.
        global_batch: samples of a step over all ranks; None: not known.
        tail: what became of samples that filled no global batch; None: not known.
    """

    start: Cursor
    stop: Cursor
    step: int | None = None
    global_batch: int | None = None
    tail: Tail | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the span as JSON values."""
        return {**asdict(self), "start": list(self.start), "stop": list(self.stop)}

    @classmethod
    def from_dict(cls, span: Mapping[str, Any]) -> ReadSpan:
        """Return what `to_dict` gave. Raises CorruptDataError."""
        try:
            start, stop = (_cursor(*span[name]) for name in ("start", "stop"))
            step, global_batch, tail = (span.get(name) for name in ("step", "global_batch", "tail"))
            if start > stop or not (_is_count(step, 0) and _is_count(global_batch, 1)):
                raise ValueError(f"from {start} to {stop}, step {step!r}, batches of {global_batch!r}")  # noqa: TRY301
            return cls(start, stop, step, global_batch, None if tail is None else parse_tail(tail))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"this is no span of what a run consumed: {error}; found {span!r}") from error


@dataclass(frozen=True)
class DataUse:
    """A split or mixture that a run reads, and how far it has come. `ConsumptionTracker` makes it for a loader.

    Attributes:
        dataset: the version, "digits@1"; of a mixture those of all its splits.
        split: "train"; of a mixture "mixture".
        state: the loader's state: order, epoch, position. Everything before it was consumed.
        purpose: "training", or "evaluation" for data that the weights were not made of.
        run: tells uses that one run made from those of others; None: not known.
        spans: what the run consumed since its weights were those of the version that it continues, in order; ()
            where nobody wrote it down.
    """

    dataset: str
    split: str
    state: Mapping[str, Any]
    purpose: str = "training"
    run: str | None = None
    spans: Sequence[ReadSpan] = ()

    def __post_init__(self) -> None:
        if self.purpose not in _PURPOSES:
            raise ConfigError(f"purpose is {self.purpose!r}; expected one of {', '.join(_PURPOSES)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the use as JSON values, without what was not said."""
        own: dict[str, Any] = {"dataset": self.dataset, "split": self.split, "state": dict(self.state)}
        if self.purpose != "training":
            own["purpose"] = self.purpose
        if self.run is not None:
            own["run"] = self.run
        if self.spans:
            own["spans"] = [span.to_dict() for span in self.spans]
        return own

    @classmethod
    def from_dict(cls, use: Mapping[str, Any]) -> DataUse:
        """Return what `to_dict` gave, now or before there were purposes, runs and spans. Raises CorruptDataError."""
        try:
            spans = tuple(map(ReadSpan.from_dict, use.get("spans", ())))
            state = dict(use["state"])
            purpose, run = use.get("purpose", "training"), use.get("run")
            if not isinstance(run, str | None):
                raise TypeError(f"run is {run!r}")  # noqa: TRY301
            return cls(str(use["dataset"]), str(use["split"]), state, purpose, run, spans)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError(f"this does not say which data was used: {error!r}; found {use!r}") from error


@runtime_checkable
class ReadLoader(Protocol):
    """What a `ConsumptionTracker` asks of a loader: those of `loaders` have it."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands."""

    @property
    def batch_size(self) -> int:
        """Samples of this rank per step."""

    @property
    def tail(self) -> Tail:
        """What becomes of the samples that fill no global batch."""

    @property
    def ranks(self) -> Any:
        """Has `world_size`, the number of data ranks."""

    @property
    def split(self) -> Any:
        """A split, or a mixture."""


class ConsumptionTracker:
    """Keeps what a run consumes from a loader, for its versions: `save(..., data=[reading.use()])`.

    Make it when the loader stands where the run begins: after `load_state_dict` where it resumes. One rank is enough,
    the one that saves. Where weights come from a living process and not from a version, its `state_dict` comes with
    them: what they consumed since their version would be lost otherwise.

    Args:
        loader: of the training data; one batch of it, over all ranks, is one optimizer step.
        step: optimizer steps behind the weights now.

    Raises:
        ConfigError: the loader is none of datasvc, so that it does not tell where it stands.
    """

    def __init__(self, loader: ReadLoader, *, step: int = 0) -> None:
        self._run = secrets.token_hex(8)
        self._spans: list[ReadSpan] = []
        self._begin(loader, step)

    def go_on(self, loader: ReadLoader, *, step: int) -> None:
        """Say that the run goes on with another loader, at another world size or batch size, from where it stands.

        Args:
            loader: from now on; it stands where the weights do.
            step: optimizer steps behind the weights now.
        """
        self._spans.append(self._span(cursor_of(loader.state_dict())))
        self._begin(loader, step)

    def state_dict(self) -> dict[str, Any]:
        """Return what was consumed up to now, as JSON values, for a process that takes over the weights as they are.

        Raises ConfigError as `use`.
        """
        spans = (*self._spans, self._span(cursor_of(self._loader.state_dict())))
        return {"run": self._run, "spans": [span.to_dict() for span in spans]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another process consumed; the next version has the parent that its next would have had.

        Args:
            state: its `state_dict`, of the moment in which the weights and the loader's state were taken.

        Raises:
            CorruptDataError: that is no such state.
            ConfigError: the loader does not stand where that process did.
        """
        try:
            run, spans = state["run"], [ReadSpan.from_dict(span) for span in state["spans"]]
            stop = spans[-1].stop
        except (KeyError, TypeError, IndexError) as error:
            raise CorruptDataError(f"this is no state of a Reading: {error!r}; found {state!r}") from error
        if stop != self._start:
            raise ConfigError(
                f"the loader stands at {self._start} (epoch, position), and what was consumed ends at {stop}: load "
                "the loader's state of the same moment first, and make the Reading then"
            )
        self._run, self._spans = str(run), spans

    def use(self) -> DataUse:
        """Return what was consumed up to now. Raises ConfigError: the loader was put back to before the run began."""
        # The order alone: which decoder the pixels came from is in the loader's state, beside the weights.
        state = {name: value for name, value in self._loader.state_dict().items() if name != "decode"}
        splits = getattr(self._loader.split, "splits", None)
        if splits is None:
            dataset, split = self._loader.split.dataset, self._loader.split.name
        else:
            dataset, split = ", ".join(dict.fromkeys(each.dataset for each in splits)), "mixture"
        spans = (*self._spans, self._span(cursor_of(state)))
        return DataUse(str(dataset), str(split), state, run=self._run, spans=spans)

    def _begin(self, loader: ReadLoader, step: int) -> None:
        if not isinstance(loader, ReadLoader):
            raise ConfigError(
                f"a {type(loader).__name__} does not tell which samples it has served: save versions without data=, "
                "or read with a loader of `loaders`, such as datasvc.loaders.torch.ResumableDataLoader"
            )
        self._loader = loader
        self._start, self._step = cursor_of(loader.state_dict()), step

    def _span(self, stop: Cursor) -> ReadSpan:
        loader = self._loader
        if stop < self._start:
            raise ConfigError(
                f"the loader stands at {stop} (epoch, position), before {self._start}, where this run began: it was "
                "put back; make a new Reading where the weights are put back too"
            )
        return ReadSpan(self._start, stop, self._step, loader.batch_size * loader.ranks.world_size, loader.tail)


def cursor_of(state: Mapping[str, Any]) -> Cursor:
    """Return where a loader's state stands. Raises ConfigError: it is none."""
    try:
        return _cursor(state["epoch"], state["position"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"this is no loader's state, it has no epoch and position: {sorted(state)}; of a StatefulDataLoader take "
            "order_state(loader.state_dict())"
        ) from error


def _cursor(epoch: object, position: object) -> Cursor:
    if not (_is_count(epoch, 0) and _is_count(position, 0)) or epoch is None or position is None:
        raise ValueError(f"epoch {epoch!r} and position {position!r} are not integers from 0 on")
    return cast("Cursor", (epoch, position))


def _is_count(value: object, least: int) -> bool:
    return value is None or (type(value) is int and value >= least)
