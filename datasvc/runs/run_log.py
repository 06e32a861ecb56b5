"""`RunLog`: records the events of a training run in the repository, from a thread that never stops the training."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from types import TracebackType
from typing import Any, Final, Literal, Self, get_args

from datasvc.errors import ConfigError, DatasvcError
from datasvc.printable import count_text
from datasvc.repository import Repository
from datasvc.repository.logs.log import Log
from datasvc.repository.logs.references import check_name
from datasvc.runs.collector import MAX_VERSIONS, Collector
from datasvc.runs.facts import choose_facts, limit_size, to_json_value, to_text
from datasvc.runs.part import WRITE_LIMITS, AttemptWriter, choose_parts, read_parts, with_unused_bins
from datasvc.runs.resources import ResourceMeter
from datasvc.runs.run_folders import check_run_id, new_run_id, run_folder
from datasvc.threads import run_before_threads_end

Outcome = Literal["finished", "failed", "interrupted"]

FLUSH_S: Final = 1.0
HEARTBEAT_S: Final = 20.0
CLOSE_TIMEOUT_S: Final = 10.0
_MAX_QUEUED: Final = 100_000
_MAX_RETRY_S: Final = 60.0
_MAX_INTERVAL_S: Final = 3600
# A part with very many curves is large, and is written again with each new step. After a large write, wait for so
# long as its bytes take at this rate, but not longer than a heartbeat.
_TARGET_BYTES_PER_S: Final = 64 << 10
# While the store fails, events are collected for its next answer, within these limits.
_LIMITS_WHILE_FAILING: Final = replace(WRITE_LIMITS, num_bins=4 * WRITE_LIMITS.num_bins)
_MAX_LATEST_BYTES: Final = 16 << 10
_MAX_FIELD_BYTES: Final = 1 << 20  # of a header
# Lists of runs show these, so they are kept of very many facts.
_LATEST_FIRST: Final = frozenset({"step", "epoch", "progress", "coverage", "unit", "loss", "step_s", "wait_s"})

_LOG = logging.getLogger(__name__)


class RunLog:
    """Log of one training run. `RunLog.open` returns it; close it, or use it as a context manager.

    One process of a run writes: in a job of several ranks, rank 0. `report` takes a few microseconds. A thread writes
    what was reported every `flush_s` seconds. If the store fails, the training goes on: the thread tries again, and
    what it cannot keep in its limited memory is lost, counted, and logged as a warning.

    Attributes:
        name: name of the run, usually that of the model that it trains.
        id: identifier of the run, such as "20261123-221830-3fa9c1".
    """

    def __init__(
        self,
        repository: Repository,
        name: str,
        run_id: str,
        header: Mapping[str, Any],
        *,
        flush_s: float,
        heartbeat_s: float,
    ) -> None:
        self.name = name
        self.id = run_id
        self._num_refused = 0  # counted by the threads of the program
        self._num_failed = 0  # counted by the thread of the log
        self._repository = repository
        self._storage = repository.storage
        self._header = header
        self._flush_s = flush_s
        self._heartbeat_s = heartbeat_s
        self._log = Log(repository.storage, run_folder(name, run_id))
        self._queue: deque[tuple[float, str, dict[str, Any]]] = deque()
        self._attempt: AttemptWriter | None = None
        self._collector = Collector()
        self._resources = ResourceMeter()
        self._is_failing = False
        self._retry_s = flush_s
        self._active_s = time.monotonic()  # when the program has reported last, to `flush_s`
        # By `time.monotonic`; 0: the first part is written at once, so that lists show the run.
        self._next_write = self._earliest_write = 0.0
        self._flushes: deque[threading.Event] = deque()
        self._wake = threading.Event()
        self._end: tuple[Outcome, str] | None = None
        self._give_up = False
        self._pid = os.getpid()
        log = weakref.ref(self)
        run_before_threads_end(lambda: _close_forgotten(log))
        # A daemon: a store that does not answer must not keep the program from ending.
        self._thread = threading.Thread(target=self._work, name="datasvc-run-log", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        repository: Repository | str,
        name: str,
        *,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        data: Sequence[str] | str = (),
        parent: str | None = None,
        code: Mapping[str, Any] | None = None,
        world_size: int = 1,
        layout: Mapping[str, int] | None = None,
        facts: Mapping[str, Any] | None = None,
        flush_s: float = FLUSH_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> Self:
        """Open the log of a new run, or the next attempt of a run that was interrupted.

        This does not wait for the store. All values but `name` and `run_id` are stored as they are in the header of
        the attempt, if need be as text.

        Args:
            repository: repository, or its URL, that gets the log.
            name: name of the run, usually that of the model that it trains; runs of one name are listed together.
            run_id: identifier of the run to continue, from its `id`; None: a new run.
            config: effective configuration.
            data: versions of data sets, such as "digits@3".
            parent: model version that the run continues or starts from.
            code: revision of the code, such as `CodeRevision.to_dict()`.
            world_size: number of ranks.
            layout: number of parts by axis, such as {"data": 2, "tensor": 4}.
            facts: further facts of the attempt.
            flush_s: least seconds between two parts; with very many curves there are more, up to `heartbeat_s`.
            heartbeat_s: seconds after which a part is written although nothing was reported. Readers call a run "not
                responding" some of these intervals after its newest part.

        Raises:
            ConfigError: `name`, `run_id` or an interval is not valid.
            NotFoundError, UnavailableError: `repository` is a URL at which there is none.
        """
        check_name(name, "run")
        for interval_name, interval_s in {"flush_s": flush_s, "heartbeat_s": heartbeat_s}.items():
            if not 0 < interval_s <= _MAX_INTERVAL_S:
                raise ConfigError(f"{interval_name} is {interval_s}; expected seconds, at most {_MAX_INTERVAL_S:,}")
        if isinstance(repository, str):
            repository = Repository.open(repository)
        run_id = new_run_id() if run_id is None else check_run_id(run_id)
        header = _make_header(
            {
                "name": name,
                "id": run_id,
                "world_size": world_size,
                "layout": layout,
                "config": config,
                "data": [data] if isinstance(data, str) else list(data),
                "parent": parent,
                "code": code,
                "facts": facts,
                "flush_s": flush_s,
                "heartbeat_s": heartbeat_s,
            }
        )
        return cls(repository, name, run_id, header, flush_s=flush_s, heartbeat_s=heartbeat_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(*outcome_of(error))

    def __repr__(self) -> str:
        return f"RunLog({self.ref!r})"

    @property
    def ref(self) -> str:
        """Reference to the run, such as "digits-cnn/20261123-221830-3fa9c1"."""
        return f"{self.name}/{self.id}"

    @property
    def num_lost(self) -> int:
        """Number of reported events that are lost."""
        return self._num_refused + self._num_failed

    def report(self, event: str, /, **facts: Any) -> None:
        """Record an event; this never fails, and does not wait.

        Numbers of an event "step" that has a `step`, the number of optimizer steps, become curves; of old steps,
        means, minima and maxima are kept. The log adds the processors and the memory that this process uses
        (docs/how-to/runs.md), unless a number of the same name is reported. Events with other names keep all of
        their facts: "evaluation" with metrics, "checkpoint" with `version`, and any other. Of events of one name
        that are reported thousands of times, evenly spaced ones are kept. Do not change a list or dict that was
        passed. A tensor of one number is read up to `flush_s` later: pass a float if its value changes in place.

        Args:
            event: name of the event.
            facts: values of the event; other values than JSON's become text.
        """
        if len(self._queue) >= _MAX_QUEUED or self._end is not None:
            self._num_refused += 1
            return
        self._queue.append((time.time(), event, facts))

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Write what was reported; return whether the store has it now."""
        done = threading.Event()
        if not self._thread.is_alive():
            return not self._is_failing and not self._queue
        self._flushes.append(done)
        self._wake.set()
        return done.wait(timeout_s) and not self._is_failing

    def close(self, outcome: Outcome = "finished", message: str = "", *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what was reported, and the outcome. A second call does nothing.

        Args:
            outcome: "finished"; "failed", with the error as `message`; or "interrupted", by a signal or a lost rank.
            message: one sentence for readers.
            timeout_s: seconds to wait for the store.
        """
        if outcome not in get_args(Outcome):
            raise ConfigError(f"outcome is {outcome!r}; expected one of {', '.join(get_args(Outcome))}")
        # In a forked child there is no thread, and the log belongs to the parent.
        if self._end is not None or os.getpid() != self._pid:
            return
        self._end = outcome, to_text(message)
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up = True
            _LOG.warning("%s: the store does not answer, so the end of the run log is not written", self.ref)
        elif self.num_lost:
            _LOG.warning("%s: %s could not be written to the run log", self.ref, count_text(self.num_lost, "event"))

    def _work(self) -> None:
        """Write parts until the log is closed; the body of the thread."""
        while True:
            self._wake.wait(self._flush_s)
            self._wake.clear()
            # Read before the queue: what was reported before the call of `flush` or `close` is then written.
            end, flushes = self._end, [self._flushes.popleft() for _ in range(len(self._flushes))]
            is_written = self._try_to_write(end, is_urgent=bool(flushes))
            for done in flushes:
                done.set()
            if end is not None and (is_written or self._give_up):
                return

    def _collect(self) -> None:
        """Move reported events from the queue to the collector."""
        num_signs = self._collector.num_signs
        for _ in range(len(self._queue)):
            try:
                self._collector.add(*self._queue.popleft())
            except Exception:  # noqa: BLE001 - methods of a user's class; the other events are not lost
                self._num_failed += 1
                _LOG.debug("%s: an event is lost", self.ref, exc_info=True)
        if self._collector.num_signs != num_signs:
            self._active_s = time.monotonic()
        limits = _LIMITS_WHILE_FAILING if self._is_failing else WRITE_LIMITS
        num_bins = 0 if self._attempt is None else self._attempt.num_bins
        self._collector.compact(with_unused_bins(limits, num_bins), self._resources.read)

    def _try_to_write(self, end: tuple[Outcome, str] | None, *, is_urgent: bool) -> bool:
        """Write a part if one is due; return False if the store has failed."""
        if self._give_up:
            for _ in range(len(self._queue)):
                self._queue.popleft()
                self._num_failed += 1
            return False
        now = time.monotonic()
        try:
            self._collect()
            is_due = is_urgent or end is not None or now >= self._next_write
            has_work = self._collector.has_content and now >= self._earliest_write
            if not is_due and (self._is_failing or not has_work):
                return not self._is_failing
            num_bytes = self._write(end)
        except (DatasvcError, OSError) as error:
            self._note_failure(error)
            return False
        except Exception:  # noqa: BLE001 - the top of a thread
            # A defect of ours. The thread lives on, or `flush` and `close` would wait in vain.
            _LOG.exception("%s: nothing more is written to the run log; the training continues", self.ref)
            self._give_up = self._is_failing = True
            return False
        if self._is_failing:
            _LOG.warning("%s: the run log is written again", self.ref)
        self._is_failing, self._retry_s = False, self._flush_s
        self._next_write = now + self._heartbeat_s
        self._earliest_write = now + num_bytes / _TARGET_BYTES_PER_S
        return True

    def _write(self, end: tuple[Outcome, str] | None) -> int:
        """Write the next part of the attempt, which begins with its header; return its bytes.

        Raises the errors of `Storage.create`.
        """
        if self._attempt is None:
            entry = self._log.append(lambda head: {**self._header, "attempt": head + 1})
            self._attempt = AttemptWriter(self._storage, self._log.path, entry.number)
            if entry.number > 1:
                self._continue_after(entry.number)
        head = self._make_head(self._attempt.attempt, end)
        return self._attempt.write(head, self._collector.take(), is_last=end is not None)

    def _continue_after(self, attempt: int) -> None:
        """Begin with what lists show of the attempt before, until this one reports it: it may take no step."""
        with contextlib.suppress(DatasvcError, OSError):  # without it, the run is only shown as one without steps
            listed = choose_parts(self._storage.list(self._log.path))
            older = [part for part in listed if part.attempt < attempt]
            parts, _ = read_parts(self._storage, self._log.path, older[-1:])
            head = parts[-1].head if parts else {}
            unreported = self._find_unreported(head.get("versions", []))
            started_s = self._header["started"]
            self._collector.continue_after(started_s, head, self._header.get("parent"), unreported)

    def _find_unreported(self, reported: Sequence[str]) -> list[tuple[str, int]]:
        """Return version and step of those that the run saved after the `reported` ones, oldest first.

        An attempt that is killed does not report what it saved last. The next one continues the newest of these
        versions, and each of them has its run and the version before it.
        """
        found: list[tuple[str, int]] = []
        ref = self._header.get("parent")
        with contextlib.suppress(DatasvcError, OSError):  # the version is of another repository, or is damaged
            while ref is not None and ref not in reported and len(found) < MAX_VERSIONS:
                version = self._repository.resolve("models", ref, removed=True)
                content = self._repository.entry(version).content
                if content.get("run") != self.ref:
                    break
                found.append((str(version), content["step"]))
                ref = content.get("parent")
        return found[::-1]

    def _make_head(self, attempt: int, end: tuple[Outcome, str] | None) -> dict[str, Any]:
        """Return what lists of runs show, see docs/reference/formats.md."""
        state, message = ("running", "") if end is None else end
        return {
            "run": self.ref,
            "attempt": attempt,
            # Parts of two writers differ, which `Storage.create` needs.
            "writer": secrets.token_hex(8),
            "time": round(time.time(), 3),
            "heartbeat_s": self._heartbeat_s,
            # By the monotonic clock of this machine: a reader that compares times needs equal and steady clocks.
            "idle_s": round(time.monotonic() - self._active_s, 3),
            "world_size": self._header["world_size"],
            "data": self._header["data"],
            "state": state,
            "message": message,
            "latest": choose_facts(self._collector.latest, _LATEST_FIRST, _MAX_LATEST_BYTES),
            "versions": self._collector.versions,
            **self._collector.warnings,
            "lost": self.num_lost,
        }

    def _note_failure(self, error: Exception) -> None:
        if not self._is_failing:
            _LOG.warning(
                "%s: the run log cannot be written (%s); the training continues, and the log is written again when "
                "the store answers",
                self.ref,
                error,
            )
        self._is_failing = True
        self._next_write = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)


def _make_header(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of an attempt that starts now: `fields` that are not None, the time, and this process."""
    process = {
        "started": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "package": _package_version(),
        "python": sys.version.split()[0],
    }
    return {
        name: limit_size(to_json_value(value), _MAX_FIELD_BYTES)
        for name, value in {**fields, **process}.items()
        if value is not None
    }


def _package_version() -> str | None:
    try:
        return metadata.version("datasvc")
    except metadata.PackageNotFoundError:
        return None


def outcome_of(error: BaseException | None) -> tuple[Outcome, str]:
    """Return the outcome of a run that ended with `error`, and a message."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished", ""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "interrupted", f"{type(error).__name__} {error}".strip()
    return "failed", f"{type(error).__name__}: {error}"


def _close_forgotten(log: weakref.ref[RunLog]) -> None:
    """Close a log that the program has not closed when it ends."""
    if (forgotten := log()) is not None:
        forgotten.close("interrupted", "the program ended without closing the log")
