"""What a submitter holds while its operation runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import Request

Result = Tensor | list[Tensor] | tuple[Tensor, Tensor] | int | None


class Handle:
    """The future result of one operation. Set once by the engine, read by any thread, any number of times."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gathered_rows: tuple[tuple[int, ...], ...] = ()
        """After an allgather: for each tensor, how many rows came from each rank, in rank order."""
        self.received_splits: tuple[int, ...] = ()
        """After an alltoall: how many rows came from each rank, in rank order."""
        self.present: Callable[[Result], Result] | None = None
        """Makes what the submitter gets of what the engine gives; None leaves it as it is."""
        self._finished = threading.Event()
        self._result: Result = None
        self._error: Exception | None = None
        self._cuda_done: tuple[torch.cuda.Event, torch.device] | None = None

    def is_finished(self) -> bool:
        """Whether `wait` would return or raise at once."""
        if not self._finished.is_set() or self._cuda_done is None:
            return self._finished.is_set()
        return bool(self._cuda_done[0].query())  # type: ignore[no-untyped-call]  # torch has no types here

    def wait(self) -> Result:
        """The result, once there. On CUDA the current stream waits for it, the host does not.

        Raises:
            HorovodInternalError: the operation failed.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error
        self._let_current_stream_wait()
        return self._result if self.present is None else self.present(self._result)

    def settle(self) -> None:
        """Waits until the operation no longer touches its tensors; forgets an error."""
        self._finished.wait()
        self._let_current_stream_wait()

    def succeed(self, result: Result, cuda_done: tuple[torch.cuda.Event, torch.device] | None = None) -> None:
        """Hands over the result; on CUDA with the event after which it is valid, and the device."""
        self._result, self._cuda_done = result, cuda_done
        self._finished.set()

    def fail(self, error: Exception) -> None:
        """Hands over the reason why there is no result."""
        self._error = error
        self._finished.set()

    def _let_current_stream_wait(self) -> None:
        if self._cuda_done is None:
            return
        event, device = self._cuda_done
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        # What the engine's stream allocated must not be given to others while this one still reads it.
        for tensor in self._result if isinstance(self._result, list | tuple) else [self._result]:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request with its tensors, as one rank holds it.

    `outputs` may be the inputs themselves; there are none where the engine allocates them (allgather).
    `result` is what the submitter gets: usually the outputs, in the shape in which it asked. `is_prescaled`:
    the inputs have been multiplied by the prescale factor already.
    """

    request: Request
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    result: Result = None
    is_prescaled: bool = False
    cuda_ready: torch.cuda.Event | None = None
    handle: Handle = field(repr=False)


Finish = Callable[[Submission, Result], None]
"""Told by whoever ran an operation: once, with its result."""
