"""Finds which ranks a job has lost.

A broken connection does not say whose end broke it, and a rank that waits for a neighbour which waits for a lost rank
has no broken connection at all. A rank that is stopped, or cut off from the network, breaks none. Therefore each rank
watches the store of the job. It counts there as long as it runs, and looks whether the next rank counts. The first
rank that fails, or that misses the counts of the next one, asks all ranks in the store; the lost ones do not answer.

Only changes of a count are compared, by the clock of the rank that looks: clocks of machines differ.

In an elastic job, the launcher sees the end of a process at once, and each rank looks whether it has. A report then
ends the round, and the ranks continue with those that are left.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _world

import datasvc.trainer as hvd
from datasvc.errors import DatasvcError
from datasvc.models.saving.rank_channel import LostRankError
from datasvc.planning.layout import LOST_AFTER_S, replica_size_of
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.rendezvous import RoundStore, current_rendezvous
from datasvc.trainer.rendezvous.signs_of_life import POLL_S, STORE_FACTOR, SilenceTimer

_LOG = logging.getLogger(__name__)

# The Layouts page promises a report within 10 s of a loss. That is the time from a count to the look that sees it,
# `LOST_AFTER_S`, the time until the look that finds the count too old, and the time for answers.
# Time in which all ranks that run have answered. The launcher kills what is left 5 s after the first has failed.
_ANSWER_S: Final = 2.5
_LEAVE_S: Final = 3.0  # time in which the main thread leaves its collectives after a report
_UNWIND_S: Final = 30.0  # time in which it has then closed what it uses, and has ended
# In an elastic job this rank is not lost yet: it may be computing, and leaves at its next collective.
_ELASTIC_LEAVE_S: Final = 30.0
_ENDED: Final = "ended"
_FAILURE, _SILENCE = "failure", "silence"


class LostRankWatch:
    """Threads that report lost ranks while the main thread waits in a collective, and end its wait.

    Every rank makes one after `hvd.init`, and closes it before `hvd.shutdown`, after its last collective.

    Args:
        lost_after_s: seconds without a sign of life after which a rank is asked whether it runs.
        connect: returns the store of the round of an elastic job, over a connection of its own; None: the job is not
            elastic. Called again if the connection is lost.
        report_silent: in an elastic job, gets ranks that gave no sign of life for `lost_after_s`; it ends them.
        has_whole_model: whether each rank has the whole model. Such a rank is not ended: it may compute for long, as
            in an evaluation, and the engine finds what the launcher reports.
        end: called if the main thread does not leave its collectives after a report, or leaves them by an error and
            then does not end; default: end the process.
    """

    def __init__(
        self,
        *,
        lost_after_s: float = LOST_AFTER_S,
        connect: Callable[[], RoundStore] | None = None,
        report_silent: Callable[[list[int]], None] | None = None,
        has_whole_model: bool = False,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._rank, self._size = hvd.rank(), hvd.size()
        self._lost_after_s = lost_after_s
        self._end = end or ((lambda: None) if has_whole_model else self._end_process)
        # A connection of its own: the main thread may wait in the other one.
        self._connect, self._report_silent = connect, report_silent
        self._store: Any = cast("Any", _get_default_store()).clone() if connect is None else connect()
        self._heeds_launcher = connect is not None and not has_whole_model
        self._leave_s = _LEAVE_S if connect is None else _ELASTIC_LEAVE_S
        again = "start the job again: it continues its newest version, also with another layout"
        self._remedy = again if connect is None else "the job continues with the ranks that are left"
        self._wake, self._closed, self._failed = threading.Event(), threading.Event(), threading.Event()
        self._found, self._left = threading.Event(), threading.Event()
        self._reporting = threading.Lock()
        self._num_pulses = 0
        self._round = 0  # questions that all ranks have answered
        self._message = ""
        self._explained: HorovodInternalError | None = None
        self._threads = [
            threading.Thread(target=target, name="lost-ranks", daemon=True)
            for target in ((self._watch,) if has_whole_model else (self._watch, self._watch_store))
        ]
        for thread in self._threads:
            thread.start()

    def explain(self, error: Exception) -> HorovodInternalError:
        """Return the error for work that lost a connection, with the numbers of the lost ranks."""
        if error is self._explained:
            return self._explained
        self._failed.set()
        self._wake.set()
        # One question may be open, about a rank that was silent; its answer comes first.
        self._found.wait(2 * (_ANSWER_S + 2 * POLL_S) + 1.0)
        self._explained = HorovodInternalError(f"{self._message or 'a rank failed or was lost'} ({error})")
        return self._explained

    @property
    def has_found(self) -> bool:
        """Whether ranks were reported lost, so that this rank's collectives fail."""
        return self._found.is_set()

    def leave(self) -> None:
        """Note that the main thread has left its collectives, by an error: it ends this process itself."""
        self._left.set()

    def close(self) -> None:
        """End the threads, which report nothing from now on. Other calls have no effect."""
        with self._reporting:
            self._closed.set()
        self._wake.set()
        self._threads[0].join(2 * POLL_S)  # it tells the others that this rank has not been lost

    @property
    def _is_over(self) -> bool:
        # A program that has failed may shut the job down without closing this.
        return self._closed.is_set() or self._found.is_set() or not hvd.is_initialized()

    def _watch(self) -> None:
        next_rank, silence = (self._rank + 1) % self._size, SilenceTimer()
        try:
            while not self._is_over:
                self._pulse()
                if self._heeds_launcher and (broken := self._store.find_broken()):
                    self._report(broken)
                    break
                has_begun = self._store.check([_beat_key(next_rank)])
                value = self._store.get(_beat_key(next_rank)) if has_begun else b""
                silent_s = silence.look(value, time.monotonic())
                if not has_begun and self._report_silent is not None:
                    silent_s = 0.0  # it may still be getting the state
                reason = _FAILURE if self._failed.is_set() else ""
                if silent_s > self._lost_after_s and value != _ENDED.encode():
                    reason = reason or _SILENCE
                if reason:
                    # The first rank that asks decides: all then report the same ranks.
                    self._store.compare_set(self._key("asked"), "", f"{self._rank} {reason}")
                if reason or self._store.check([self._key("asked")]):
                    self._answer()
                    silence = SilenceTimer()
                else:
                    self._wake.wait(POLL_S)
            if self._closed.is_set():
                self._store.set(_beat_key(self._rank), _ENDED)
        except (RuntimeError, ValueError):
            if self._connects_again():
                self._watch()
                return
            _LOG.debug("rank %d no longer watches the other ranks", self._rank, exc_info=True)
            # Without a store, no rank can answer. Its host may have ended as it should, before this rank.
            self._message = "the connection to the store of the job was lost: the launcher, or rank 0 without one"
            self._found.set()

    def _connects_again(self) -> bool:
        """Connect to the store again, once: a rank that no longer counts would be ended."""
        if self._connect is None or self._is_over:
            return False
        connect, self._connect = self._connect, None
        try:
            self._store = connect()
        except (RuntimeError, ValueError):
            return False
        return True

    def _watch_store(self) -> None:
        """Report the store if the other thread waits for it."""
        silence, limit_s = SilenceTimer(), STORE_FACTOR * self._lost_after_s
        while not self._closed.wait(POLL_S) and not self._is_over and self._threads[0].is_alive():
            if silence.look(self._num_pulses, time.monotonic()) > limit_s:
                self._report(
                    f"the store of the job has not answered for {limit_s:g} s: the launcher, or rank 0 without one, "
                    "was lost or stopped; start the job again: it continues its newest version"
                )

    def _pulse(self) -> None:
        self._num_pulses += 1
        self._store.set(_beat_key(self._rank), str(self._num_pulses))

    def _key(self, name: str) -> str:
        return f"layout/{self._round}/{name}"

    def _answer(self) -> None:
        """Answer the open question, and report the ranks that do not."""
        asker, reason = self._store.get(self._key("asked")).decode().split()
        self._store.set(self._key(f"answer/{self._rank}"), "")
        if int(asker) == self._rank:
            self._wait_for([f"answer/{rank}" for rank in range(self._size)], _ANSWER_S)
            lost = self._find_lost()
            if reason == _SILENCE and self._report_silent is not None:
                lost = self._end_silent(lost)
            self._store.set(self._key("lost"), json.dumps(lost))
        elif self._wait_for(["lost"], _ANSWER_S + 2 * POLL_S + (self._lost_after_s if reason == _SILENCE else 0.0)):
            lost = json.loads(self._store.get(self._key("lost")))
        else:
            lost = sorted({int(asker), *self._find_lost()})
        self._round += 1
        if lost:
            ranks = f"rank {lost[0]} was" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} were"
            silence = f", without a sign of life for {self._lost_after_s:g} s" if reason == _SILENCE else ""
            self._report(f"{ranks} lost, of {self._size}{silence}: read the output there, and {self._remedy}")
        elif reason == _FAILURE:
            self._report(f"a connection was lost, and all ranks run: {self._remedy}")
        else:
            _LOG.info("rank %s missed signs of life of the next rank, which runs", asker)

    def _end_silent(self, lost: list[int]) -> list[int]:
        """Have silent ranks ended; return those that are lost. They have counted, and were silent for long enough."""
        assert self._report_silent is not None
        # Only the next rank has been watched so far: give the others as long.
        others = [f"answer/{rank}" for rank in lost if rank != (self._rank + 1) % self._size]
        self._wait_for(others, self._lost_after_s)
        lost = self._find_lost()
        silent = [rank for rank in lost if self._store.check([_beat_key(rank)])]
        if silent and not self._closed.is_set():
            self._report_silent(silent)
        return lost

    def _find_lost(self) -> list[int]:
        """Return the ranks that have neither answered nor ended."""
        silent = [rank for rank in range(self._size) if not self._store.check([self._key(f"answer/{rank}")])]
        keys = {rank: _beat_key(rank) for rank in silent}
        return [
            rank
            for rank, key in keys.items()
            if not (self._store.check([key]) and self._store.get(key) == _ENDED.encode())
        ]

    def _wait_for(self, names: list[str], seconds: float) -> bool:
        """Wait until the open question has all of these keys, at most so long; return whether it has."""
        missing, deadline_s = names, time.monotonic() + seconds
        while missing and time.monotonic() < deadline_s:
            self._pulse()
            missing = [name for name in missing if not self._store.check([self._key(name)])]
            if missing:
                time.sleep(POLL_S / 10)
        return not missing

    def _report(self, message: str) -> None:
        """Report what is lost, and make the main thread leave its collectives."""
        with self._reporting:
            if self._found.is_set() or self._closed.is_set():
                return
            self._message = message
            _LOG.error("rank %d: %s", self._rank, message)
            self._found.set()
            # With the lock, so that after `close` no group of the next round is aborted.
            for group in list(_world.pg_map):
                with contextlib.suppress(RuntimeError):
                    group.abort()
        has_ended = False
        if self._left.wait(self._leave_s):
            # What it closes may wait too, such as a save that another rank has a part of.
            has_ended = self._closed.wait(_UNWIND_S) or not hvd.is_initialized()
        if not (has_ended or self._closed.is_set()):
            self._end()

    def _end_process(self) -> None:
        # As the training program reports this error. The name of the class tells the launcher that another rank is
        # the cause.
        sys.stderr.write(f"error: {HorovodInternalError.__name__}: {self._message}\n")
        sys.stderr.flush()
        os._exit(1)


def _beat_key(rank: int) -> str:
    return f"layout/beat/{rank}"


@contextlib.contextmanager
def explaining_lost_ranks(watch: LostRankWatch | None) -> Iterator[None]:
    """Raise `HorovodInternalError` with the numbers of the lost ranks for errors in the context that these caused.

    Contexts may be nested. Without a watch, errors stay as they are.
    """
    try:
        yield
    except BaseException as error:
        if watch is not None:
            watch.leave()
        if watch is None or not isinstance(error, RuntimeError | DatasvcError):
            raise
        if not (watch.has_found or is_lost_connection(error)):
            raise
        explained = watch.explain(error)
        if explained is error:
            raise
        raise explained from error


@contextlib.contextmanager
def watching_round(config: Any) -> Iterator[LostRankWatch | None]:
    """Watch the ranks of a round of an elastic run, in the context; yield None if each has the whole model.

    Its collectives then fail with those of the engine, which finds ranks itself that close their connections. Every
    rank calls this, after the rendezvous. `config` has the settings of the run, a `TrainConfig`.
    """
    rendezvous = current_rendezvous()
    has_whole_model = config.layout is None or replica_size_of(config.layout) == 1
    if has_whole_model and (rendezvous is None or hvd.size() == 1):
        yield None
        return
    connect = report = None
    if rendezvous is not None:
        assert rendezvous.assignment is not None, "a round has begun"
        # The number of now: a thread may report when the next round has other ranks of these numbers.
        report = partial(rendezvous.report_silent, rendezvous.assignment.round_number)
        connect = partial(rendezvous.watched_store, os.environ)
    watch = LostRankWatch(
        lost_after_s=config.lost_after, connect=connect, report_silent=report, has_whole_model=has_whole_model
    )
    try:
        yield None if has_whole_model else watch
    except BaseException:
        watch.leave()
        if not has_whole_model:
            _drop_groups()
        raise
    finally:
        watch.close()


def _drop_groups() -> None:
    """Delete the process groups that torch's meshes keep, so that other ranks do not wait for this one in them.

    DTensor caches plans with meshes for the whole process. A mesh finds its groups by their names, in a later round
    those of that round; torch keeps the objects for compiled graphs only.
    """
    for mesh in gc.get_objects():
        if issubclass(type(mesh), DeviceMesh):  # `isinstance` would call a proxy, of an object that may be gone
            cast("Any", mesh)._pg_registry.clear()  # noqa: SLF001 - torch has no method for it


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error came from the connections of this rank to others, not from its computation."""
    if isinstance(error, DatasvcError):
        # A save has connections of its own.
        return isinstance(error, LostRankError) or isinstance(error.__cause__, LostRankError)
    # gloo raises RuntimeError; its messages have the file of its source, and those of its pairs the word connection.
    text = str(error).lower()
    return isinstance(error, dist.DistError | HorovodInternalError) or "gloo" in text or "connection" in text
