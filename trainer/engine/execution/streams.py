"""Orders CUDA work between the user's stream and the engine's stream. Has no effect for CPU tensors.

Invariant: the engine works on a stream of its own. This stream first waits for the event of the submission, and the
stream that uses the result waits for the engine's stream. The host waits only if tensors are sent through its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def record_submission(device: torch.device) -> torch.cuda.Event | None:
    """Return the CUDA event after which tensors that are submitted now are valid; None on a device without CUDA."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
    event.record(torch.cuda.current_stream(device))
    return event


class EngineStreams:
    """The CUDA streams of the engine, one per device, each created on first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def on_engine_stream(
        self, device: torch.device, ready_events: Iterable[torch.cuda.Event | None], tensors: Iterable[Tensor]
    ) -> Iterator[None]:
        """Run the block on the engine's stream of a device.

        Args:
            device: device of the tensors; without CUDA, the block just runs.
            ready_events: events for which the stream waits before the block; None is skipped.
            tensors: tensors whose memory is not reused before the CUDA work of the block has ended.
        """
        if device.type != "cuda":
            yield
            return
        stream = self._streams.get(device)
        if stream is None:  # `setdefault` would create a stream on each call
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        for event in ready_events:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield
        # torch's allocator must not reuse this memory for the user's stream before the engine's stream has used it.
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def record_end(self, device: torch.device) -> tuple[torch.cuda.Event, torch.device] | None:
        """Return the event after which the engine's work so far on this device is done, and the device.

        None if the engine has no stream on this device, so that no caller has to wait.
        """
        stream = self._streams.get(device)
        return (stream.record_event(), device) if stream is not None else None
