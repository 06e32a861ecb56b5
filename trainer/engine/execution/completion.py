"""What comes after collectives that are under way, in the order in which they began.

So the engine negotiates and packs the next operation while one travels.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from datasvc.trainer.engine.execution.transport import CollectiveWork


class _Pending(NamedTuple):
    work: CollectiveWork
    after: Callable[[CollectiveWork], None]


class Completions:
    """A thread that waits for each collective and then does what its beginner has left to do.

    Invariant: once `close` returned nothing here touches a tensor. (What is under way in a group that broke may,
    until the group is destroyed.)
    """

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self._on_error = on_error
        self._changed = threading.Condition()
        self._pending: deque[_Pending] = deque()
        self._is_closing = False
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="trainer-completions", daemon=True)
        self._thread.start()

    def add(self, work: CollectiveWork, after: Callable[[CollectiveWork], None], *, is_short: bool) -> None:
        """Lets `after`, which waits for the work, run later, in turn.

        Args:
            work: has begun.
            after: gets the work; an exception from it means that the job is lost.
            is_short: so short that it is awaited here, if nothing is before it: another thread would cost more.
        """
        if is_short and not self._pending:
            after(work)
            return
        with self._changed:
            self._pending.append(_Pending(work, after))
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread. What is still under way is dropped: the groups below it are gone."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def drain(self) -> None:
        """Waits until everything is done, or the job lost."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self._is_broken)

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closing)
                if self._is_closing or not self._pending:
                    return
                work, after = self._pending[0]
            if not self._complete(work, after):
                return
            del work, after
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()

    def _complete(self, work: CollectiveWork, after: Callable[[CollectiveWork], None]) -> bool:
        try:
            after(work)
        except Exception as error:  # noqa: BLE001 - the top of a thread; the engine tells whoever waits
            # Its words only: the traceback would keep the work, and so the connections whose end tells other ranks.
            self._on_error(str(error))
            with self._changed:
                self._is_broken = True
                self._pending.clear()
                self._changed.notify_all()
            return False
        return True
