"""Runs agreed operations on the data group. Every rank runs the same list in the same order."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.engine.buffers import FusionBuffers
from trainer.engine.fusion import Buffer, plan_fusion
from trainer.engine.handles import Result, Submission
from trainer.engine.negotiation import Ready
from trainer.engine.requests import Kind, ReduceOp
from trainer.engine.scaling import scale_
from trainer.engine.streams import EngineStreams
from trainer.engine.transport import Transport

# gloo has no int16. A wider sum also cannot overflow before it is averaged.
_WIRE_DTYPES = {torch.int16: torch.int32}

REDUCIBLE_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)

Finish = Callable[[Submission, Result], None]


class Executor:
    """Packs, sends and unpacks; reports each finished submission through ``finish``."""

    def __init__(self, transport: Transport, *, fusion_bytes: int, streams: EngineStreams, finish: Finish) -> None:
        self._transport = transport
        self._fusion_bytes = fusion_bytes
        self._streams = streams
        self._finish = finish
        self._buffers = FusionBuffers()

    def run(self, operations: Sequence[tuple[Ready, Submission]]) -> None:
        """Runs the allreduces first, fused, then the rest in order.

        Raises:
            RuntimeError: the group is broken; what was not reported as finished never will be.
        """
        allreduces = [mine for _, mine in operations if mine.request.kind is Kind.ALLREDUCE]
        self._allreduce(allreduces)
        for ready, mine in operations:
            if mine.request.kind is Kind.ALLGATHER:
                self._allgather(ready, mine)
            elif mine.request.kind is Kind.BROADCAST:
                self._broadcast(mine)
            elif mine.request.kind is Kind.BARRIER:
                # That every rank has asked for it is all that a barrier waits for.
                self._finish(mine, None)

    def _allreduce(self, submissions: Sequence[Submission]) -> None:
        requests = [submission.request for submission in submissions]
        element_bytes = {name: _wire_dtype(name).itemsize for request in requests for name in request.dtypes}
        buffers = plan_fusion(requests, fusion_bytes=self._fusion_bytes, element_bytes=element_bytes)
        last_buffer = {slot.operation: index for index, buffer in enumerate(buffers) for slot in buffer.slots}
        for index, buffer in enumerate(buffers):
            self._reduce(buffer, submissions)
            for operation in dict.fromkeys(slot.operation for slot in buffer.slots):
                if last_buffer[operation] == index:
                    self._finish(submissions[operation], submissions[operation].result)

    def _reduce(self, buffer: Buffer, submissions: Sequence[Submission]) -> None:
        inputs = [submissions[slot.operation].inputs[slot.member] for slot in buffer.slots]
        outputs = [submissions[slot.operation].outputs[slot.member] for slot in buffer.slots]
        ready = [submissions[slot.operation].cuda_ready for slot in buffer.slots]
        request = submissions[buffer.operation].request
        assert request.reduce_op is not None
        with self._streams.working_on(outputs[0].device, ready, inputs + outputs):
            flat = self._pack(buffer, inputs, outputs)
            scale_(flat, factor=request.prescale_factor)
            if flat.numel():
                self._transport.allreduce(flat, request.reduce_op)
            divisor = self._transport.size if request.reduce_op is ReduceOp.AVERAGE else 1
            scale_(flat, factor=request.postscale_factor, divisor=divisor)
            _unpack(buffer, flat, outputs)

    def _pack(self, buffer: Buffer, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        wire_dtype, wire_device = _wire_dtype(buffer.dtype), self._transport.wire_device(outputs[0].device)
        if len(outputs) == 1 and _can_travel(outputs[0], wire_dtype, wire_device):
            return _copied(inputs[0], outputs[0]).view(-1)
        flat = self._buffers.take(wire_dtype, wire_device, buffer.num_elements)
        for slot, tensor in zip(buffer.slots, inputs, strict=True):
            flat[slot.offset : slot.offset + slot.length].view(tensor.shape).copy_(tensor)
        return flat

    def _allgather(self, ready: Ready, mine: Submission) -> None:
        (tensor,) = mine.inputs
        rows = tuple(request.shapes[0][0] for request in ready.requests)
        with self._streams.working_on(tensor.device, [mine.cuda_ready], [tensor]):
            wire = tensor.to(self._transport.wire_device(tensor.device)).contiguous()
            gathered = torch.empty((sum(rows), *wire.shape[1:]), dtype=wire.dtype, device=wire.device)
            if gathered.numel():
                self._gather_bytes(_bytes_of(gathered), _bytes_of(wire), rows)
            gathered = gathered.to(tensor.device)
        mine.handle.gathered_rows = rows
        self._finish(mine, gathered)

    def _gather_bytes(self, gathered: Tensor, mine: Tensor, rows: tuple[int, ...]) -> None:
        row_bytes = gathered.numel() // sum(rows)
        parts = list(torch.split(gathered, [num_rows * row_bytes for num_rows in rows]))
        if len(set(rows)) == 1:
            self._transport.allgather(parts, mine)
            return
        # gloo gathers equal lengths only, so shorter ranks send padding.
        padded = max(rows) * row_bytes
        flat = self._buffers.take(torch.uint8, gathered.device, padded * (len(rows) + 1))
        scratch = torch.split(flat, padded)
        scratch[-1][: mine.numel()].copy_(mine)
        self._transport.allgather(list(scratch[:-1]), scratch[-1])
        for part, received in zip(parts, scratch[:-1], strict=True):
            part.copy_(received[: part.numel()])

    def _broadcast(self, mine: Submission) -> None:
        (tensor,), (output,) = mine.inputs, mine.outputs
        assert mine.request.root_rank is not None
        with self._streams.working_on(output.device, [mine.cuda_ready], [tensor, output]):
            wire_device = self._transport.wire_device(output.device)
            if self._transport.rank == mine.request.root_rank:
                _copied(tensor, output)
            if output.numel():
                wire = output.to(wire_device).contiguous()
                self._transport.broadcast(_bytes_of(wire), mine.request.root_rank)
                _copied(wire, output)
        self._finish(mine, mine.result)


def _wire_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return _WIRE_DTYPES.get(dtype, dtype)


def _can_travel(tensor: Tensor, wire_dtype: torch.dtype, wire_device: torch.device) -> bool:
    return tensor.is_contiguous() and tensor.dtype == wire_dtype and tensor.device == wire_device


def _copied(source: Tensor, target: Tensor) -> Tensor:
    return target if target is source else target.copy_(source)


def _unpack(buffer: Buffer, flat: Tensor, outputs: Sequence[Tensor]) -> None:
    for slot, output in zip(buffer.slots, outputs, strict=True):
        part = flat[slot.offset : slot.offset + slot.length]
        if part.data_ptr() != output.data_ptr():
            output.copy_(part.view(output.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
