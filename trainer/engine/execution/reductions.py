"""Runs the reductions that the negotiation has agreed on: fused allreduces, and reducescatters.

`Executor` uses this module. A fusion buffer holds several tensors, each in a slot, to reduce them by one collective.
It has the dtype and the device in which its values are sent; see `wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Completions, Finish, Submission
from datasvc.trainer.engine.execution.movements import EngineStreams, FusionBuffers
from datasvc.trainer.engine.execution.timeline import Timeline, profiled
from datasvc.trainer.engine.execution.transport import CollectiveWork, CompletedWork, Transport
from datasvc.trainer.engine.execution.wire import (
    Buffer,
    FusionSlot,
    can_send_directly,
    copy_into,
    fit_into,
    is_integer,
    join_lanes,
    max_wire_bytes,
    num_lanes,
    plan_fusion,
    split_lanes,
    wire_dtype,
)
from datasvc.trainer.engine.negotiation.negotiation import Ready
from datasvc.trainer.engine.negotiation.requests import GLOBAL_SET, ReduceOp, Request

# Collectives up to this size are completed in the engine's thread: a switch to another thread takes longer.
_SHORT_BYTES = 64 * 1024


@dataclass(kw_only=True)
class Reductions:
    """Runs allreduce and reducescatter on one rank. The other attributes are arguments of `Executor`.

    Attributes:
        fusion_bytes: maximum size of a fusion buffer, from the next operation on.
        is_hierarchical: whether allreduces are hierarchical where they can be, from the next one on.
    """

    transport: Transport
    streams: EngineStreams
    completions: Completions
    buffers: FusionBuffers
    finish: Finish
    fusion_bytes: int = 0
    is_hierarchical: bool = False
    timeline: Timeline = field(default_factory=Timeline)
    _has_node_sets: bool = False

    def allreduce(self, operations: Sequence[tuple[Ready, Submission]]) -> None:
        """Begin all allreduces, fused; each finishes when its last buffer is complete."""
        requests = [ready.request for ready, _ in operations]
        element_bytes = {name: max_wire_bytes(name) for request in requests for name in request.dtypes}
        buffers = plan_fusion(requests, fusion_bytes=self.fusion_bytes, element_bytes=element_bytes)
        # The tensors of a grouped operation may be in several buffers. Buffers complete in order, so the operation
        # finishes with its last buffer.
        last_buffer = {slot.operation: index for index, buffer in enumerate(buffers) for slot in buffer.slots}
        submissions = [submission for _, submission in operations]
        errors: dict[int, OverflowError] = {}  # by operation; of an operation in several buffers, too
        for index, buffer in enumerate(buffers):
            finishing = [number for number in buffer.operations if last_buffer[number] == index]
            # The requests of a buffer have the same process set, reduction and factors, so the first stands for all.
            ready = operations[buffer.operation][0]
            self._begin(buffer, ready, submissions, finishing, errors)

    def reducescatter(self, ready: Ready, submission: Submission) -> None:
        """Reduce the tensors over the ranks, and store this rank's rows of the results in the outputs."""
        error = None
        for name, tensor, output in zip(
            submission.request.dtypes, submission.inputs, submission.outputs, strict=True
        ):
            with self.streams.on_engine_stream(tensor.device, [submission.cuda_ready], [tensor, output]):
                if is_integer(name):
                    error = self._scatter_integers(ready, name, tensor, output) or error
                else:
                    self._scatter(ready, tensor, output)
        self.finish(submission, error or submission.result)

    def _begin(
        self,
        buffer: Buffer,
        ready: Ready,
        submissions: Sequence[Submission],
        finishing: Sequence[int],
        errors: dict[int, OverflowError],
    ) -> None:
        """Pack a buffer and begin its allreduce; afterwards unpack it, and finish the operations in `finishing`."""
        request = ready.request
        inputs = [submissions[slot.operation].inputs[slot.member] for slot in buffer.slots]
        outputs = [submissions[slot.operation].outputs[slot.member] for slot in buffer.slots]
        ready_events = [submissions[slot.operation].cuda_ready for slot in buffer.slots]
        keys = [submissions[operation].request.key for operation in buffer.operations]
        is_hierarchical = self._can_be_hierarchical(buffer, request)
        timeline = self.timeline
        timeline.begin(keys, request.kind.value.upper())
        with self.streams.on_engine_stream(outputs[0].device, ready_events, inputs + outputs):
            timeline.activity(keys, "MEMCPY_IN_FUSION_BUFFER")
            with profiled("pack"):
                # A hierarchical allreduce divides the tensor among the ranks of a node.
                multiple = self.transport.local_size if is_hierarchical else 1
                flat, packed = self._pack(buffer, request, inputs, outputs, multiple=multiple)
                # Usually no submission was scaled by the caller; then one pass scales the whole buffer.
                if not any(submissions[operation].is_prescaled for operation in buffer.operations):
                    _scale(flat, buffer.dtype, factor=request.prescale_factor)
                else:
                    self._prescale(buffer, submissions, flat)
            timeline.activity(keys, "ALLREDUCE")
            with profiled("reduce"):
                sent = flat if packed is None else packed
                scratch = None
                if is_hierarchical:
                    # Empty on a GPU, where it is not used.
                    scratch = self.buffers.take(torch.uint8, sent.device, 0 if sent.is_cuda else sent.nbytes)
                    work = self.transport.begin_hierarchical_allreduce(sent, scratch.view(sent.dtype))
                else:
                    work = self._reduce(buffer, request, sent)

        def complete(work: CollectiveWork) -> None:
            # Without events and tensors: the stream got them when the buffer was packed.
            with self.streams.on_engine_stream(outputs[0].device, (), ()):
                with profiled("wait"):
                    work.wait()
                timeline.activity(keys, "MEMCPY_OUT_FUSION_BUFFER")
                with profiled("unpack"):
                    for slot in _unpack(buffer, ready, flat, outputs):
                        errors[slot.operation] = _overflow(submissions[slot.operation].request, slot.member)
            for taken in (packed, scratch):
                if taken is not None:
                    self.buffers.give_back(taken)
            timeline.end(keys)
            for number in finishing:
                submission = submissions[number]
                self.finish(submission, errors.get(number) or submission.result)

        is_short = flat.numel() * flat.element_size() <= _SHORT_BYTES
        self.completions.add(work, complete, is_short=is_short)

    def _can_be_hierarchical(self, buffer: Buffer, request: Request) -> bool:
        return (
            self.is_hierarchical
            and self.transport.has_node_groups
            and request.process_set == GLOBAL_SET
            and request.reduce_op in (ReduceOp.SUM, ReduceOp.AVERAGE)
            and not is_integer(buffer.dtype)
            and buffer.num_elements > 0
        )

    def _pack(
        self, buffer: Buffer, request: Request, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, multiple: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the flat tensor of all slots, and the fusion buffer that begins with it, if one is used."""
        dtype, device = wire_dtype(buffer.dtype, request), self.transport.wire_device(outputs[0].device)
        num_padding, lanes = -buffer.num_elements % multiple, num_lanes(buffer.dtype, request)
        # A single tensor that can be sent as it is needs no fusion buffer: it is reduced in place, in its output.
        is_direct = len(outputs) == 1 and lanes == 1 and not num_padding
        if is_direct and can_send_directly(outputs[0], dtype, device):
            return copy_into(inputs[0], outputs[0]).view(-1), None
        num_values = buffer.num_elements * lanes
        packed = self.buffers.take(dtype, device, num_values + num_padding)
        packed[num_values:].zero_()
        flat = packed[:num_values]
        for slot, tensor in zip(buffer.slots, inputs, strict=True):
            flat[slot.offset : slot.offset + slot.length].view(tensor.shape).copy_(tensor)
        if lanes == 2:
            split_lanes(flat)
        return flat, packed

    @staticmethod
    def _prescale(buffer: Buffer, submissions: Sequence[Submission], flat: Tensor) -> None:
        for slot in buffer.slots:
            submission = submissions[slot.operation]
            if not submission.is_prescaled:
                part = flat[slot.offset : slot.offset + slot.length]
                _scale(part, buffer.dtype, factor=submission.request.prescale_factor)

    def _reduce(self, buffer: Buffer, request: Request, flat: Tensor) -> CollectiveWork:
        """Begin the reduction of a packed buffer in place. Adasum is complete when this returns."""
        assert request.reduce_op is not None
        if request.reduce_op is ReduceOp.ADASUM:
            self._reduce_by_adasum(buffer, flat)
            return CompletedWork()
        if not flat.numel():
            return CompletedWork()
        return self.transport.begin_allreduce(flat, request.reduce_op, request.process_set)

    def _reduce_by_adasum(self, buffer: Buffer, flat: Tensor) -> None:
        """Replace the tensors of the buffer by their Adasum over all ranks; return when it is complete."""
        transport = self.transport
        # Adasum combines places. With NCCL (only then is a buffer on a GPU) a place is a node, as in Horovod: average
        # within each node first. Otherwise a place is a rank.
        ranks_per_place = transport.local_size if flat.is_cuda else 1
        if ranks_per_place > 1:
            self._make_node_sets()
            transport.begin_allreduce(flat, ReduceOp.SUM, self._node_set(transport.rank // ranks_per_place)).wait()
            _scale(flat, buffer.dtype, factor=1.0, divisor=ranks_per_place)
        place, local_rank = divmod(transport.rank, ranks_per_place)

        def swap(sent: Tensor, partner_place: int) -> Tensor:
            received = torch.empty_like(sent)
            partner_rank = partner_place * ranks_per_place + local_rank
            transport.swap(received, sent, partner_rank, GLOBAL_SET)
            return received

        parts = [flat[slot.offset : slot.offset + slot.length] for slot in buffer.slots]
        combine_over_tree(parts, flat, place=place, num_places=transport.size // ranks_per_place, swap=swap)

    def _make_node_sets(self) -> None:
        """Create a process set of the ranks of each node, once; every rank calls this in the same order."""
        transport = self.transport
        if self._has_node_sets:
            return
        self._has_node_sets = True
        for node in range(transport.size // transport.local_size):
            first = node * transport.local_size
            transport.add_process_set(self._node_set(node), range(first, first + transport.local_size))

    @staticmethod
    def _node_set(node: int) -> int:
        return -1 - node  # negative, so that it differs from the number of every process set of users

    def _scatter(self, ready: Ready, tensor: Tensor, output: Tensor) -> None:
        """Reduce one tensor over the ranks, and store this rank's rows of the result in `output`."""
        request, transport, name = ready.request, self.transport, str(tensor.dtype).removeprefix("torch.")
        # Always copy, because `_scale` and the allreduce below overwrite `wire`.
        wire = tensor.to(transport.wire_device(tensor.device), copy=True).contiguous()
        _scale(wire, name, factor=request.prescale_factor)
        lengths = _row_lengths(wire, ready)
        parts = list(torch.split(wire.view(-1), lengths))
        received = torch.empty(output.numel(), dtype=wire.dtype, device=wire.device)
        if min(lengths):
            transport.reducescatter(received, parts, request.process_set)
        elif wire.numel():
            # Some ranks get no rows, and not every backend supports empty parts: reduce all rows on every rank.
            transport.begin_allreduce(wire.view(-1), ReduceOp.SUM, request.process_set).wait()
            received.copy_(parts[ready.members.index(transport.rank)])
        _scale(received, name, factor=request.postscale_factor, divisor=_divisor(ready))
        output.copy_(received.view(output.shape))

    def _scatter_integers(self, ready: Ready, name: str, tensor: Tensor, output: Tensor) -> OverflowError | None:
        """As `_scatter`; return an error on all ranks, and store nothing, if a value of any rank does not fit."""
        # Reduce all rows on every rank, so that all of them find such a value.
        request, transport = ready.request, self.transport
        reduced = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        buffer = Buffer(name, (FusionSlot(0, 0, 0, tensor.numel()),))
        flat, packed = self._pack(buffer, request, [tensor], [reduced], multiple=1)
        _scale(flat, name, factor=request.prescale_factor)
        if flat.numel():
            transport.begin_allreduce(flat, ReduceOp.SUM, request.process_set).wait()
        overflowing = _unpack(buffer, ready, flat, [reduced])
        if packed is not None:
            self.buffers.give_back(packed)
        if overflowing:
            return _overflow(request, 0)
        rows = torch.split(reduced.view(-1), _row_lengths(reduced, ready))[ready.members.index(transport.rank)]
        output.copy_(rows.view(output.shape))
        return None


def _row_lengths(tensor: Tensor, ready: Ready) -> list[int]:
    """Return the number of values that each rank gets of a tensor in a reducescatter."""
    row_length = tensor[:1].numel()  # 0 if there are no rows
    return [rows * row_length for rows in split_rows(tensor.shape[0], len(ready.members))]


def split_rows(num_rows: int, num_ranks: int) -> list[int]:
    """Return each rank's number of rows in a reducescatter; the first `num_rows % num_ranks` ranks get one more."""
    rows_per_rank, num_longer = divmod(num_rows, num_ranks)
    return [rows_per_rank + (index < num_longer) for index in range(num_ranks)]


def _divisor(ready: Ready) -> int:
    return len(ready.members) if ready.request.reduce_op is ReduceOp.AVERAGE else 1


def _scale(tensor: Tensor, name: str, *, factor: float, divisor: int = 1) -> None:
    """Set values of the named dtype to `tensor * factor / divisor`; truncate integers, as Horovod does."""
    if factor == 1.0 and divisor == 1:
        return
    if not is_integer(name):
        tensor.mul_(factor / divisor)  # torch scales half precision in float32, and rounds once
    elif tensor.dtype.is_floating_point:
        # A division, not a multiplication by the reciprocal: 49 * (1 / 49) truncates to 0.
        tensor.mul_(factor).div_(divisor).trunc_()
    else:
        tensor.div_(divisor, rounding_mode="trunc")


def _unpack(buffer: Buffer, ready: Ready, flat: Tensor, outputs: Sequence[Tensor]) -> list[FusionSlot]:
    """Scale reduced values and store them in the outputs; return the slots whose integers do not fit their dtype."""
    request, divisor = ready.request, _divisor(ready)
    lanes = flat.chunk(2) if num_lanes(buffer.dtype, request) == 2 else (flat,)
    if len(lanes) == 1:
        _scale(flat, buffer.dtype, factor=request.postscale_factor, divisor=divisor)
    overflowing = []
    for slot, output in zip(buffer.slots, outputs, strict=True):
        part, *low = (lane[slot.offset : slot.offset + slot.length] for lane in lanes)
        fits = True
        if low:
            part, fits = join_lanes(part, low[0], divisor)
        # A tensor that was reduced in place has the result already.
        if fits and part.data_ptr() != output.data_ptr():
            fits = fit_into(part, output)
        if not fits:
            overflowing.append(slot)
    return overflowing


def _overflow(request: Request, member: int) -> OverflowError:
    op, dtype = request.reduce_op, request.dtypes[member]
    assert op is not None
    return OverflowError(
        f"{request.key.describe()}: the {op.value} over the ranks does not fit {dtype}; give the tensor a wider "
        "dtype, such as int64, or a floating point one"
    )


# `Reductions` uses it for allreduces with `Adasum`. Ranks combine in pairs: at level k of a tree, each rank exchanges
# with the rank whose number differs in bit k. Both get the same result, so after the last level all ranks have the
# same bits. Dot products are computed per tensor, not per buffer, in float64.


def combine_over_tree(
    parts: Sequence[Tensor], flat: Tensor, *, place: int, num_places: int, swap: Callable[[Tensor, int], Tensor]
) -> None:
    """Overwrite `parts` with their Adasum over all places. Every rank calls this in the same order.

    A place is a participant in the tree: one rank, or one node that has averaged the tensors of its ranks.

    Args:
        parts: tensors that are combined one by one; flat views of `flat`.
        flat: flat tensor that is exchanged.
        place: number of this rank's participant, from 0.
        num_places: number of participants, a power of two.
        swap: function that sends a tensor to a place and returns the tensor received from it.
    """
    distance = 1
    while distance < num_places:
        partner = place ^ distance
        # Send the whole buffer in one message, although the parts are combined one by one.
        received = swap(flat, partner)
        # The parts have the same positions in the received tensor as in `flat`.
        offset = flat.storage_offset()
        received_parts = [received[p.storage_offset() - offset :][: p.numel()] for p in parts]
        for part, received_part in zip(parts, received_parts, strict=True):
            # Both partners use the same order of arguments, so they get the same bits.
            lower, upper = (part, received_part) if place < partner else (received_part, part)
            part.copy_(combine(lower, upper))
        distance *= 2


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return `a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)` of two flat tensors; if one is zero, return the other."""
    # Computed in float64, because a dot product sums over a whole tensor: in half precision, small terms would be
    # lost or the sum would overflow.
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    product, norm_a, norm_b = (
        float(torch.dot(x, y)) for x, y in ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b))
    )
    weight_a = 1.0 - product / (2 * norm_a) if norm_a else 1.0
    weight_b = 1.0 - product / (2 * norm_b) if norm_b else 1.0
    return (wide_a * weight_a + wide_b * weight_b).to(a.dtype)
