"""Runs the agreed operations that move values without changing them: allgather, broadcast, alltoall.

Values are sent as bytes, so every dtype is supported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.buffers import FusionBuffers
from datasvc.trainer.engine.execution.handles import Finish, Submission
from datasvc.trainer.engine.execution.streams import EngineStreams
from datasvc.trainer.engine.execution.transport import Transport
from datasvc.trainer.engine.execution.wire import as_bytes, copy_into
from datasvc.trainer.engine.negotiation.negotiation import Ready
from datasvc.trainer.engine.negotiation.requests import Request


@dataclass(frozen=True, kw_only=True)
class Movements:
    """The executor of allgather, broadcast and alltoall; see `Executor` for the arguments."""

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
            if output.numel():
                # `wire` is the output itself, unless the output cannot be sent: then it is a copy. This is the case
                # for outputs that are strided, lazily negated, or on a GPU without NCCL.
                wire = _materialized(output).to(self.transport.wire_device(output.device)).contiguous()
                self.transport.broadcast(as_bytes(wire), root_rank, ready.request.process_set)
                copy_into(wire, output)
        self.finish(submission, submission.result)

    def alltoall(self, ready: Ready, submission: Submission) -> None:
        """Send rows to the ranks of the set, and collect the received rows."""
        (tensor,) = submission.inputs
        rank_in_set = ready.members.index(self.transport.rank)
        sent = submission.request.splits
        assert sent is not None
        received = [_splits(request)[rank_in_set] for request in ready.requests.values()]
        with self.streams.on_engine_stream(tensor.device, [submission.cuda_ready], [tensor]):
            wire = _materialized(tensor[: sum(sent)]).to(self.transport.wire_device(tensor.device)).contiguous()
            output = torch.empty((sum(received), *wire.shape[1:]), dtype=wire.dtype, device=wire.device)
            row_bytes = wire.element_size() * wire.shape[1:].numel()
            # The condition has the same value on all ranks, so either all take part in the collective or none does.
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
        wire = _materialized(tensor).to(self.transport.wire_device(tensor.device)).contiguous()
        gathered = torch.empty((sum(rows), *wire.shape[1:]), dtype=wire.dtype, device=wire.device)
        if gathered.numel():
            self._gather_bytes(as_bytes(gathered), as_bytes(wire), rows, process_set)
        return gathered.to(tensor.device)

    def _gather_bytes(self, gathered: Tensor, local_bytes: Tensor, rows: tuple[int, ...], process_set: int) -> None:
        row_bytes = gathered.numel() // sum(rows)
        parts = list(torch.split(gathered, [num_rows * row_bytes for num_rows in rows]))
        if len(set(rows)) == 1:
            self.transport.allgather(parts, local_bytes, process_set)
            return
        # gloo gathers equal lengths only, so ranks with fewer rows add padding.
        padded = max(rows) * row_bytes
        flat = self.buffers.take(torch.uint8, gathered.device, padded * (len(rows) + 1))
        scratch = torch.split(flat, padded)
        scratch[-1][: local_bytes.numel()].copy_(local_bytes)
        self.transport.allgather(list(scratch[:-1]), scratch[-1], process_set)
        for part, received in zip(parts, scratch[:-1], strict=True):
            part.copy_(received[: part.numel()])
        self.buffers.give_back(flat)


def _materialized(tensor: Tensor) -> Tensor:
    """Return the tensor with its values in memory, not their lazy negatives or conjugates."""
    return tensor.resolve_conj().resolve_neg()


def _splits(request: Request) -> tuple[int, ...]:
    assert request.splits is not None
    return request.splits
