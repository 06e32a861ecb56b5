"""Handles and submissions of operations.

A handle is the future result of an operation; a submission is a request with its tensors. `job.submit` makes both for
each call of a user; the engine finishes the handle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
        request: description of the operation, for the other ranks.
        inputs: tensors that the engine reads.
        outputs: tensors that the engine writes; may be the inputs. Empty if it allocates them, as for allgather.
        result: value that the handle returns: usually the outputs, as one tensor or as a list.
        is_prescaled: whether the inputs include the prescale factor already, so that the engine does not apply it.
        cuda_ready: CUDA event after which the tensors are valid; None on a CPU.
        handle: future result.
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
