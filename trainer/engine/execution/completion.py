"""Completes collectives in flight in a separate thread, in the order in which they began.

To complete a collective is to wait for it, and then to unpack its result and finish its submissions. Meanwhile the
engine's thread negotiates and packs the next operations.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from datasvc.trainer.engine.execution.transport import CollectiveWork


class Completions:
    """A thread that runs the completion function of each collective.

    Invariant: after `close` has returned, no completion function uses a tensor. But the collectives of broken process
    groups may still use tensors, so the caller must destroy these groups.

    Args:
        on_error: called with the text of the first error of a completion function. After that, no function runs.
    """

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self._on_error = on_error
        self._changed = threading.Condition()
        self._pending: deque[tuple[CollectiveWork, Callable[[CollectiveWork], None]]] = deque()
        self._is_closing = False
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="trainer-completions", daemon=True)
        self._thread.start()

    def add(self, work: CollectiveWork, after: Callable[[CollectiveWork], None], *, is_short: bool) -> None:
        """Queue a completion function, which waits for the work.

        Args:
            work: collective that has begun.
            after: completion function, called with the work; an exception in it ends the job.
            is_short: whether to complete the work in the calling thread if the queue is empty; faster for short work.
        """
        # Needs no lock: only the thread that calls `add` makes the queue longer, so an empty queue stays empty here.
        if is_short and not self._pending:
            after(work)
            return
        with self._changed:
            self._pending.append((work, after))
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread. Work that is pending after `drain` is discarded, because its groups are broken."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def drain(self) -> None:
        """Wait until all work is complete, or a completion has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self._is_broken)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # a setting per thread; nothing here is differentiated
        try:
            while self._complete_next():
                pass
        except Exception as error:  # noqa: BLE001 - the top of a thread; the engine reports the error to waiting threads
            # Keep only the text, because a traceback refers to the work, and the work to its connections. These must
            # close, because the other ranks detect the failure by the closed connections.
            self._on_error(str(error))
            with self._changed:
                self._is_broken = True
                self._pending.clear()
                self._changed.notify_all()

    def _complete_next(self) -> bool:
        """Run the first completion function; return False if the thread is to end instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            if self._is_closing:
                return False
            # The work stays in the queue until it is complete, so that `drain` waits for it, and `add` does not
            # complete later work before it.
            work, after = self._pending[0]
        after(work)
        # Delete the references before `drain` returns: after that, no thread may refer to a tensor of the work.
        del work, after
        with self._changed:
            self._pending.popleft()
            self._changed.notify_all()
        return True
