"""Handles and submissions of operations, and the thread that completes their collectives.

A handle is the future result of an operation; a submission is a request with its tensors. `job.submit` makes both for
each call of a user; the engine finishes the handle.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.transport import CollectiveWork
from datasvc.trainer.engine.negotiation.requests import Request

Result = Tensor | list[Tensor] | tuple[Tensor, Tensor] | int | None


class Handle:
    """The future result of one operation. The engine sets the result once; any thread may read it repeatedly."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gathered_rows: tuple[tuple[int, ...], ...] = ()
        """After an allgather: for each tensor, the number of rows from each rank, in rank order."""
        self.received_splits: tuple[int, ...] = ()
        """After an alltoall: the number of rows from each rank, in rank order."""
        self.present: Callable[[Result], Result] | None = None
        """Converts the engine's result to the value that `wait` returns; None for no conversion."""
        self._finished = threading.Event()
        self._result: Result = None
        self._error: Exception | None = None
        self._cuda_done: tuple[torch.cuda.Event, torch.device] | None = None

    def is_finished(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        if not self._finished.is_set() or self._cuda_done is None:
            return self._finished.is_set()
        return bool(self._cuda_done[0].query())  # type: ignore[no-untyped-call]  # untyped in torch

    def wait(self) -> Result:
        """Wait for the result and return it. For CUDA work, the current stream waits, not the host.

        Raises:
            HorovodInternalError: the operation failed.
            OverflowError: the result, of integers, does not fit their dtype.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error
        self._make_current_stream_wait()
        return self._result if self.present is None else self.present(self._result)

    def settle(self) -> None:
        """Wait until the operation no longer uses its tensors; ignore its error."""
        self._finished.wait()
        self._make_current_stream_wait()

    def succeed(self, result: Result, cuda_done: tuple[torch.cuda.Event, torch.device] | None = None) -> None:
        """Set the result. On CUDA, `cuda_done` is the CUDA event after which the result is valid, and the device."""
        # `_finished` is set last, because a thread that waits for it then reads the result at once.
        self._result, self._cuda_done = result, cuda_done
        self._finished.set()

    def fail(self, error: Exception) -> None:
        """Set the error of the operation."""
        self._error = error
        self._finished.set()

    def _make_current_stream_wait(self) -> None:
        """Order later work on torch's current stream after the operation; the host does not wait."""
        if self._cuda_done is None:
            return
        event, device = self._cuda_done
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        # Memory that the engine's stream allocated must not be reused while the current stream reads it.
        for tensor in self._result if isinstance(self._result, list | tuple) else [self._result]:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request of one rank with its tensors.

    Attributes:
        outputs: tensors that the engine writes; may be the inputs. Empty if it allocates them, as for allgather.
        result: value that the handle returns: usually the outputs, as one tensor or as a list.
        is_prescaled: whether the inputs include the prescale factor already, so that the engine does not apply it.
        cuda_ready: CUDA event after which the tensors are valid; None on a CPU.
    """

    request: Request
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    result: Result = None
    is_prescaled: bool = False
    cuda_ready: torch.cuda.Event | None = None
    handle: Handle = field(repr=False)


Finish = Callable[[Submission, Result | OverflowError], None]
"""A callback that the executor calls once for each finished submission, with its result or its error."""


# Completing a collective means: wait for it, unpack its result, and finish its submissions. During this, the engine's
# thread negotiates and packs the next operations.


class Completions:
    """A thread that runs the completion function of each collective.

    Invariant: after `close` has returned, no completion function uses a tensor. But the collectives of broken process
    groups may still use tensors, so the caller must destroy these groups. `on_error` gets the text of the first error
    of a completion function. After that, no function runs.
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
