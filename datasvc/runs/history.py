"""What a reader gets of a run: its state, its curves and its events. Pure: parts and headers in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.runs.content import STEP
from datasvc.runs.facts import RunEvent
from datasvc.runs.forecast import LossForecast, forecast_curve
from datasvc.runs.run_folders import started_s
from datasvc.runs.step_table import Series
from datasvc.shown import ShownTable, plot, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RunState = Literal["running", "finished", "failed", "interrupted", "not responding"]
MISSED_HEARTBEATS: Final = 6
"""A run whose newest part is older than so many heartbeats is not responding."""
_IDLE_S: Final = 60.0
_IDLE_AT_START_S: Final = 600.0
_STATES: Final = ("running", "finished", "failed", "interrupted")
_COLUMNS: Final = {
    "kind": pa.string(),
    "name": pa.string(),
    "step": pa.int64(),
    "value": pa.float64(),
    "low": pa.float64(),
    "high": pa.float64(),
    "time_s": pa.float64(),
    "num_steps": pa.int64(),
}
_NEW_RUN: Final[Mapping[str, Any]] = {"state": "running", "latest": {}, "versions": [], "lost": 0}


@dataclass(frozen=True)
class RunSummary:
    """One run in a list.

    Attributes:
        name: name of the run.
        id: identifier of the run.
        state: "running"; "finished", "failed" or "interrupted", as the writer has said; or "not responding", if the
            writer has not said so and has written nothing for `MISSED_HEARTBEATS` intervals.
        message: message of the outcome, such as the error; "" without one. Any text: escape it.
        started_s: when the run began, in seconds since 1970.
        last_s: when its newest part was written, by the clock of the machine that wrote it.
        num_attempts: number of attempts: 1, and one for each time that the run was continued.
        latest: newest value of each fact of the `step` events, such as `step`, `progress`, `loss` and `unit`.
        versions: model versions that the run has saved, oldest first; at most the last 100 of the last attempt.
        world_size: number of ranks of the last attempt; None: unknown.
        data: versions of data sets.
        num_lost: number of events that the last attempt has lost.
        num_stalls: number of `stall` events of the last attempt: steps that waited long for their data.
        last_stall_s: when the last of them was reported, in seconds since 1970; None: none was.
        stragglers: ranks that the others wait for, from the newest `ranks` event of the last attempt; at most 8.
        verdict: bottleneck in words, from its newest `diagnosis` event; "" without one. Any text: escape it.
        idle_s: seconds for which the program had reported nothing when the newest part was written, by the clock of
            its machine. The log's own thread writes parts also while the program hangs.
        step_interval_s: seconds between the last two reports of steps; None: unknown.
        busy: work during which the program takes no steps, such as "evaluation"; "" for none. Any text: escape it.
        stalled: operation that some ranks have not submitted; nothing else was reported since: `operation`, a text,
            and `ranks`, at most 8; None: none.
    """

    name: str
    id: str
    state: RunState
    message: str
    started_s: float
    last_s: float
    num_attempts: int
    latest: Mapping[str, Any]
    versions: Sequence[str]
    world_size: int | None
    data: Sequence[str]
    num_lost: int
    num_stalls: int = 0
    last_stall_s: float | None = None
    stragglers: Sequence[int] = ()
    verdict: str = ""
    idle_s: float = 0.0
    step_interval_s: float | None = None
    busy: str = ""
    stalled: Mapping[str, Any] | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether the program runs, but takes no steps: ranks are missing, or it is silent for far too long."""
        if self.state != "running":
            return False
        return self.stalled is not None or (not self.busy and self.idle_s > self._idle_limit_s)

    @property
    def _idle_limit_s(self) -> float:
        """Seconds of silence after which a run is stalled."""
        step_s = self.latest.get("step_s")
        if self.step_interval_s is None:
            # Before the first steps, a program compiles, restores and stages data.
            return _IDLE_AT_START_S
        # A program may report a step in a hundred: then the interval between reports counts, not the step.
        lengths = (20 * step_s if isinstance(step_s, int | float) else 0.0, 3 * self.step_interval_s)
        return max(_IDLE_S, *lengths)

    @property
    def ref(self) -> str:
        """Reference to the run, such as "digits-cnn/20261123-221830-3fa9c1"."""
        return f"{self.name}/{self.id}"

    @property
    def step(self) -> int | None:
        """Number of optimizer steps; None before the first one."""
        step = self.latest.get(STEP)
        return step if type(step) is int else None

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON values."""
        return {**vars(self), "ref": self.ref, "latest": dict(self.latest), "versions": [*self.versions],
                "data": [*self.data], "stragglers": [*self.stragglers], "is_stalled": self.is_stalled}  # fmt: skip


@dataclass(frozen=True)
class RunHistory(ShownTable):
    """What the log of a run has.

    Attributes:
        summary: state of the run.
        headers: header of each attempt that can be read, by its number; see docs/reference/formats.md.
        series: numbers of the `step` events by name, such as "loss". If an attempt has repeated steps of an earlier
            one, because it continued an older checkpoint, the newer attempt counts.
        evaluation: metrics of the `evaluation` events, in the same way.
        events: all events but the steps, oldest first.
        problems: parts and headers that cannot be read, and events that are lost or left out, in words.
        cursor: position after all of this, for `follow_run`.
    """

    summary: RunSummary
    headers: Mapping[int, Mapping[str, Any]]
    series: Mapping[str, Series]
    evaluation: Mapping[str, Series]
    events: Sequence[RunEvent]
    problems: Sequence[str] = ()
    cursor: str = ""

    @property
    def header(self) -> Mapping[str, Any]:
        """Header of the newest attempt: configuration, host, code and other facts; {} if it cannot be read."""
        return self.headers[max(self.headers)] if self.headers else {}

    @property
    def versions(self) -> list[str]:
        """Model versions that the run has saved, oldest first.

        The version that a later attempt continues is one of them: an attempt that is killed may not report its last.
        """
        saved: list[tuple[int, Any]] = [
            (event.attempt, event.facts.get("version")) for event in self.events if event.event == "checkpoint"
        ]
        reported = [version for _, version in saved]
        parents = [(number, header.get("parent")) for number, header in self.headers.items() if number > 1]
        saved = [(number, version) for number, version in parents if version not in reported] + saved
        saved.sort(key=lambda version: version[0])  # stable: the parent comes before what its attempt has saved
        return list(dict.fromkeys(version for _, version in saved if isinstance(version, str)))

    def to_arrow(self) -> pa.Table:
        """Return a row for each point of each curve.

        Columns: `kind` ("step" or "evaluation"), `name`, `step`, `value`, `low`, `high`, `time_s` (since 1970), and
        `num_steps` that the point combines.
        """
        columns: dict[str, list[object]] = {name: [] for name in _COLUMNS}
        for kind, curves in {"step": self.series, "evaluation": self.evaluation}.items():
            for name, series in curves.items():
                columns["kind"] += [kind] * len(series)
                columns["name"] += [name] * len(series)
                for column, values in zip(
                    ("step", "value", "low", "high", "time_s", "num_steps"),
                    (series.steps, series.values, series.low, series.high, series.times, series.counts),
                    strict=True,
                ):
                    columns[column] += values.tolist()
        return pa.table(columns, schema=pa.schema(_COLUMNS.items()))

    def plot(self, name: str = "loss", *, ax: Axes | None = None) -> Axes:
        """Plot a curve, or a metric of the evaluations, over the steps; return the axes of matplotlib.

        Args:
            name: name in `series` or `evaluation`.
            ax: axes to plot into; None for a new figure.

        Raises:
            ConfigError: matplotlib is not installed, or there is no such curve; the message lists the others.
        """
        return plot(self, name, ax=ax)

    def forecast(self, target: float, curve: str = "loss") -> LossForecast:
        """Return the step at which a curve is expected to have fallen to a value. Equal logs give equal forecasts.

        Args:
            target: the value.
            curve: name in `series` or `evaluation`.

        Raises:
            ConfigError: there is no such curve, or it has fewer than 16 finite points after the first 5 % of the
                steps; or the target is not finite.
        """
        series = self.series.get(curve, self.evaluation.get(curve))
        if series is None:
            known = ", ".join([*self.series, *self.evaluation]) or "none"
            raise ConfigError(f"{self.summary.ref} has no curve {curve!r}; its curves are: {known}")
        return forecast_curve(self.summary.ref, curve, series, target)

    def to_html(self) -> str:
        """Return the report of the run as one HTML document, which loads nothing; all text of the log is escaped."""
        return render(self, "report")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            **self.summary.to_dict(),
            "versions": self.versions,
            "headers": {str(number): dict(header) for number, header in self.headers.items()},
            "series": {name: series.to_dict() for name, series in self.series.items()},
            "evaluation": {name: series.to_dict() for name, series in self.evaluation.items()},
            "events": [{**event.to_json(), "attempt": event.attempt} for event in self.events],
            "problems": [*self.problems],
            "cursor": self.cursor,
        }


def summarize(name: str, run_id: str, head: Mapping[str, Any] | None, num_attempts: int, now_s: float) -> RunSummary:
    """Return the summary of a run from the head of its newest part; None: it has no part yet."""
    began_s = started_s(run_id)
    head = {**_NEW_RUN, "time": began_s, "heartbeat_s": 20.0, **(head or {})}
    state: RunState = head["state"] if head["state"] in _STATES else "running"
    if state == "running" and is_silent(head, now_s):
        state = "not responding"
    world_size, data = head.get("world_size"), head.get("data")
    return RunSummary(
        name=name,
        id=run_id,
        state=state,
        message=str(head.get("message", "")),
        started_s=began_s,
        last_s=head["time"],
        num_attempts=num_attempts,
        latest=head["latest"],
        versions=head["versions"],
        world_size=world_size if type(world_size) is int else None,
        data=[str(ref) for ref in data] if isinstance(data, list) else [],
        num_lost=head["lost"],
        **_warnings(head),
    )


def is_silent(head: Mapping[str, Any], now_s: float) -> bool:
    """Return whether the writer of a part with this head has missed its heartbeats."""
    return bool(now_s - head["time"] > MISSED_HEARTBEATS * head["heartbeat_s"])


def _warnings(head: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a summary that older logs do not have; what is not valid is left out."""
    num_stalls, last_stall_s, stragglers = (head.get(name) for name in ("num_stalls", "last_stall_s", "stragglers"))
    warnings: dict[str, Any] = {name: str(head.get(name, "")) for name in ("verdict", "busy")}
    if type(num_stalls) is int and isinstance(last_stall_s, int | float):
        warnings |= {"num_stalls": num_stalls, "last_stall_s": float(last_stall_s)}
    if isinstance(stragglers, list):
        warnings["stragglers"] = _ranks(stragglers)
    for name in ("idle_s", "step_interval_s"):
        if isinstance(value := head.get(name), int | float) and value >= 0:
            warnings[name] = float(value)
    stalled = head.get("stalled")
    if isinstance(stalled, dict):
        operation, ranks = stalled.get("operation"), stalled.get("ranks")
        warnings["stalled"] = {
            "operation": str(operation or ""),
            "ranks": _ranks(ranks) if isinstance(ranks, list) else [],
        }
    return warnings


def _ranks(values: Sequence[Any]) -> list[int]:
    return [rank for rank in values if type(rank) is int]
