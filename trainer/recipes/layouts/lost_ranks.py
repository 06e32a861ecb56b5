"""Finds which ranks a job has lost.

A broken connection does not say whose end broke it, and a rank that waits for a neighbour which waits for a lost rank
has no broken connection at all. Therefore each rank watches the store of the job: the first that fails reports it
there, all that run answer, and the lost ones are those that do not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store, _world

import datasvc.trainer as hvd
from datasvc.errors import DatasvcError
from datasvc.models.saving.rank_channel import LostRankError
from datasvc.trainer.errors import HorovodInternalError

_LOG = logging.getLogger(__name__)

_POLL_S: Final = 0.5
# Time in which all ranks that run have answered. The launcher kills what is left 5 s after the first has failed.
_ANSWER_S: Final = 3.0
_FAILED: Final = "layout/failed"


class LostRankWatch:
    """A thread that reports lost ranks while the main thread waits in a collective.

    Every rank makes one after `hvd.init`, and closes it after `hvd.shutdown`: until then it answers other ranks.
    """

    def __init__(self) -> None:
        self._rank, self._size = hvd.rank(), hvd.size()
        # A connection of its own: the main thread may wait in the other one.
        self._store: Store = cast("Any", _get_default_store()).clone()
        self._found, self._closed = threading.Event(), threading.Event()
        self._message = ""
        threading.Thread(target=self._watch, name="lost-ranks", daemon=True).start()

    def explain(self, error: Exception) -> HorovodInternalError:
        """Return the error for work that lost a connection, with the numbers of the lost ranks."""
        try:
            _get_default_store().set(_FAILED, "")
            self._found.wait(_ANSWER_S + 2 * _POLL_S + 1.0)
        except (RuntimeError, ValueError):
            # Without a store no rank can answer, and this error must not hide the first one.
            _LOG.debug("rank %d cannot reach the store of the job", self._rank, exc_info=True)
        return HorovodInternalError(f"{self._message or 'a rank failed or was lost'} ({error})")

    def close(self) -> None:
        """End the thread, which reports nothing from now on. Other calls have no effect."""
        self._closed.set()

    def _watch(self) -> None:
        try:
            while not self._store.check([_FAILED]):
                # A program that has failed may shut the job down without closing this.
                if self._closed.wait(_POLL_S) or not hvd.is_initialized():
                    return
            self._find()
        except (RuntimeError, ValueError):
            _LOG.debug("rank %d no longer watches the other ranks", self._rank, exc_info=True)

    def _find(self) -> None:
        """Answer, find the ranks that do not, and report them."""
        self._store.set(f"{_FAILED}/{self._rank}", "")
        deadline_s = time.monotonic() + _ANSWER_S
        lost = list(range(self._size))
        while lost and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 10)
            lost = [rank for rank in lost if not self._store.check([f"{_FAILED}/{rank}"])]
        if lost:
            ranks = f"rank {lost[0]} was" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} were"
            self._message = (
                f"{ranks} lost, of {self._size}: read the output there, and start the job again: it continues its "
                "newest version, also with another layout"
            )
        else:
            self._message = "a connection was lost, and all ranks run: start the job again"
        _LOG.error("rank %d: %s", self._rank, self._message)
        self._found.set()
        # Ends the waits of the main thread where the backend can; else the launcher ends this rank.
        for group in list(_world.pg_map):
            group.abort()


@contextlib.contextmanager
def explaining_lost_ranks(watch: LostRankWatch | None) -> Iterator[None]:
    """Raise `HorovodInternalError` with the numbers of the lost ranks for errors in the context that these caused.

    Without a watch, errors stay as they are.
    """
    try:
        yield
    except (RuntimeError, DatasvcError) as error:
        if watch is None or not is_lost_connection(error):
            raise
        raise watch.explain(error) from error


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error came from the connections of this rank to others, not from its computation."""
    if isinstance(error, DatasvcError):
        # A save has connections of its own.
        return isinstance(error, LostRankError) or isinstance(error.__cause__, LostRankError)
    # gloo raises RuntimeError; its messages have the file of its source, and those of its pairs the word connection.
    text = str(error).lower()
    return isinstance(error, dist.DistError | HorovodInternalError) or "gloo" in text or "connection" in text
