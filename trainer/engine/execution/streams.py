"""Orders CUDA work between the user's stream and the engine's stream. Has no effect for CPU tensors.

Invariant: the engine works on a separate stream, which first waits for the event of the submission; the stream that
uses the result waits for the engine's stream. The host waits only if tensors are sent through its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def record_submission(device: torch.device) -> torch.cuda.Event | None:
    """Return the event after which tensors that are submitted now are valid."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
    event.record(torch.cuda.current_stream(device))
    return event


class EngineStreams:
    """The streams of the engine, one per device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def on_engine_stream(
        self, device: torch.device, ready: Iterable[torch.cuda.Event | None], tensors: Iterable[Tensor]
    ) -> Iterator[None]:
        """Run the block on the engine's stream after all `ready` events; keep `tensors` allocated until it ends."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # untyped in torch
        for event in ready:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield
        # torch's allocator must not reuse this memory for the user's stream before the engine's stream has used it.
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def record_end(self, device: torch.device) -> tuple[torch.cuda.Event, torch.device] | None:
        """Return the event after which the engine's work so far on this device is done, and the device."""
        stream = self._streams.get(device)
        return (stream.record_event(), device) if stream is not None else None
