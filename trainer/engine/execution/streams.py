"""CUDA ordering between the user's stream and the engine's thread. Does nothing for CPU tensors.

Law: the engine works on a stream of its own that first waits for the moment of submission; whoever takes the
result waits for the engine's stream. The host waits only where tensors travel through its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def record_submission(device: torch.device) -> torch.cuda.Event | None:
    """The moment after which tensors handed over now are valid."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
    event.record(torch.cuda.current_stream(device))
    return event


class EngineStreams:
    """One side stream per device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def working_on(
        self, device: torch.device, ready: Iterable[torch.cuda.Event | None], tensors: Iterable[Tensor]
    ) -> Iterator[None]:
        """Work inside comes after all `ready` events; keeps the memory of `tensors` until it is done."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # nor here
        for event in ready:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def record_end(self, device: torch.device) -> tuple[torch.cuda.Event, torch.device] | None:
        """The moment after which the work so far on this device is done, and the device."""
        stream = self._streams.get(device)
        return (stream.record_event(), device) if stream is not None else None
