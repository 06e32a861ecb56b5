"""Runs the agreed operations that move values without changing them: allgather, broadcast, alltoall.

`Executor` uses this module. Values are sent as bytes, so every dtype is supported. Bytes can only be sent from
contiguous memory of the wire device (see `Transport.wire_device`). A variable named `wire` is a tensor that meets
this condition: the user's tensor itself if possible, else a copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Finish, Submission
from datasvc.trainer.engine.execution.transport import Transport
from datasvc.trainer.engine.execution.wire import as_bytes, copy_into
from datasvc.trainer.engine.negotiation.negotiation import Ready
from datasvc.trainer.engine.negotiation.requests import Request

# Two, so that one buffer is packed while another one is reduced.
_MAX_PER_KIND = 2

# Buffers of one kind have the same dtype and device.
_BufferKind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True, kw_only=True)
class Movements:
    """Runs allgather, broadcast and alltoall on one rank. The arguments are those of `Executor`."""

    transport: Transport
    streams: EngineStreams
    buffers: FusionBuffers
    finish: Finish

    def allgather(self, ready: Ready, submission: Submission) -> None:
        """Concatenate the tensors of the ranks along the first dimension, in rank order."""
        gathered, rows_by_tensor = [], []
        for member, tensor in enumerate(submission.inputs):
            rows = tuple(request.shapes[member][0] for request in ready.requests.values())
            with self.streams.on_engine_stream(tensor.device, [submission.cuda_ready], [tensor]):
                gathered.append(self._gather(tensor, rows, ready.request.process_set))
            rows_by_tensor.append(rows)
        submission.handle.gathered_rows = tuple(rows_by_tensor)
        self.finish(submission, gathered if submission.request.is_grouped else gathered[0])

    def broadcast(self, ready: Ready, submission: Submission) -> None:
        """Overwrite the output with the tensor of the root."""
        (tensor,), (output,) = submission.inputs, submission.outputs
        root_rank = ready.request.root_rank
        assert root_rank is not None
        with self.streams.on_engine_stream(output.device, [submission.cuda_ready], [tensor, output]):
            if self.transport.rank == root_rank:
                copy_into(tensor, output)
            # An empty tensor is not sent. The shape is the same on all ranks, so all of them skip the collective.
            if output.numel():
                # A strided or lazily negated output is copied, and so is one on a GPU without NCCL.
                wire = _materialized(output).to(self.transport.wire_device(output.device)).contiguous()
                self.transport.broadcast(as_bytes(wire), root_rank, ready.request.process_set)
                copy_into(wire, output)
        self.finish(submission, submission.result)

    def alltoall(self, ready: Ready, submission: Submission) -> None:
        """Send rows of the tensor to each rank of the set, and collect the received rows in rank order."""
        (tensor,) = submission.inputs
        rank_in_set = ready.members.index(self.transport.rank)
        sent = submission.request.splits
        assert sent is not None
        received = [_splits(request)[rank_in_set] for request in ready.requests.values()]
        with self.streams.on_engine_stream(tensor.device, [submission.cuda_ready], [tensor]):
            # The splits may leave out the last rows, which are not sent.
            wire = _materialized(tensor[: sum(sent)]).to(self.transport.wire_device(tensor.device)).contiguous()
            output = torch.empty((sum(received), *wire.shape[1:]), dtype=wire.dtype, device=wire.device)
            row_bytes = wire.element_size() * wire.shape[1:].numel()
            # Skip the collective if no rank sends a byte. The condition has the same value on all ranks, so all of
            # them take part or none does.
            if row_bytes and any(sum(_splits(request)) for request in ready.requests.values()):
                self.transport.alltoall(
                    as_bytes(output),
                    as_bytes(wire),
                    [rows * row_bytes for rows in received],
                    [rows * row_bytes for rows in sent],
                    ready.request.process_set,
                )
            output = output.to(tensor.device)
        submission.handle.received_splits = tuple(received)
        self.finish(submission, output)

    def _gather(self, tensor: Tensor, rows: tuple[int, ...], process_set: int) -> Tensor:
        """Return the rows of all ranks as one tensor; `rows` is the number of rows of each rank."""
        wire = _materialized(tensor).to(self.transport.wire_device(tensor.device)).contiguous()
        gathered = torch.empty((sum(rows), *wire.shape[1:]), dtype=wire.dtype, device=wire.device)
        if gathered.numel():
            self._gather_bytes(as_bytes(gathered), as_bytes(wire), rows, process_set)
        return gathered.to(tensor.device)

    def _gather_bytes(self, gathered: Tensor, local_bytes: Tensor, rows: tuple[int, ...], process_set: int) -> None:
        """Fill the bytes `gathered` with the bytes of all ranks; each rank sends its `local_bytes`."""
        row_bytes = gathered.numel() // sum(rows)
        parts = list(torch.split(gathered, [num_rows * row_bytes for num_rows in rows]))
        if len(set(rows)) == 1:
            self.transport.allgather(parts, local_bytes, process_set)
            return
        # gloo gathers equal lengths only, so ranks with fewer rows add padding. The buffer has one received part per
        # rank, and then the part that this rank sends.
        padded_bytes = max(rows) * row_bytes
        buffer = self.buffers.take(torch.uint8, gathered.device, padded_bytes * (len(rows) + 1))
        *padded_parts, sent = torch.split(buffer, padded_bytes)
        sent[: local_bytes.numel()].copy_(local_bytes)
        self.transport.allgather(padded_parts, sent, process_set)
        for part, padded_part in zip(parts, padded_parts, strict=True):
            part.copy_(padded_part[: part.numel()])
        self.buffers.give_back(buffer)


def _materialized(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it has a lazy negation or conjugation, which its bytes do not show."""
    return tensor.resolve_conj().resolve_neg()


def _splits(request: Request) -> tuple[int, ...]:
    assert request.splits is not None
    return request.splits


# Invariant: the engine works on a stream of its own. This stream first waits for the event of the submission, and the
# stream that uses the result waits for the engine's stream. The host waits only if tensors are sent through its
# memory.


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
        """Run the block on the engine's stream of a device, after the events; without CUDA, the block just runs.

        The memory of `tensors` is not reused before the CUDA work of the block has ended.
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
        """Return the event after which the engine's work on this device is done, and the device; None: no stream."""
        stream = self._streams.get(device)
        return (stream.record_event(), device) if stream is not None else None


# The pool has at most two buffers per dtype and device. It replaces a buffer only when a longer one is needed.


class FusionBuffers:
    """A pool of buffers. A buffer belongs to the caller of `take` until `give_back`, which any thread may call."""

    def __init__(self) -> None:
        self._free: dict[_BufferKind, list[Tensor]] = {}
        self._num_made: dict[_BufferKind, int] = {}  # number of buffers, free or in use
        self._changed = threading.Condition()
        self._failure: str | None = None

    def take(self, dtype: torch.dtype, device: torch.device, num_elements: int) -> Tensor:
        """Return an uninitialized contiguous `dtype[num_elements]` on the device.

        If both buffers of this dtype and device are in use, wait until one of them is given back.

        Raises:
            RuntimeError: `fail` was called before or during the wait. After a failure, a buffer in use may never be
                given back.
        """
        kind = (dtype, device)
        with self._changed:
            while not self._free.get(kind) and self._num_made.get(kind, 0) == _MAX_PER_KIND:
                if self._failure is not None:
                    raise RuntimeError(self._failure)
                self._changed.wait()
            if self._free.get(kind):
                buffer = self._free[kind].pop()
            else:
                self._num_made[kind] = self._num_made.get(kind, 0) + 1
                buffer = torch.empty(0, dtype=dtype, device=device)
        if buffer.numel() < num_elements:
            # Replace the buffer by a longer one. This soon stops, because each training step needs the same sizes.
            buffer = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements]

    def give_back(self, taken: Tensor) -> None:
        """Return a buffer from `take` to the pool."""
        buffer = taken if taken._base is None else taken._base  # noqa: SLF001 - torch has no public way to the base
        with self._changed:
            self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all buffers, and release the memory of the free ones. The engine calls this at its end."""
        with self._changed:
            self._free.clear()
            self._num_made.clear()

    def fail(self, failure: str) -> None:
        """Make each `take` that waits, or would have to wait later, raise RuntimeError with the message `failure`."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
