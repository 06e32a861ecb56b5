"""Runs the operations that the negotiation has agreed on, for the engine's thread.

Invariant: all ranks run these operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from datasvc.trainer.engine.execution.handles import Completions, Finish, Handle, Submission
from datasvc.trainer.engine.execution.movements import EngineStreams, FusionBuffers, Movements, record_submission
from datasvc.trainer.engine.execution.reductions import Reductions
from datasvc.trainer.engine.execution.timeline import Timeline, profiled
from datasvc.trainer.engine.execution.transport import Transport
from datasvc.trainer.engine.execution.wire import named_dtype
from datasvc.trainer.engine.negotiation.negotiation import Ready
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp


class Executor:
    """Runs agreed operations on one rank: passes each one to the code for its kind, which reports it as finished.

    Args:
        transport: connection to the other ranks.
        finish: callback for each finished submission, from the engine's thread or that of `completions`.
        cuda_device: function that returns the device of this rank's CUDA tensors.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        streams: EngineStreams,
        completions: Completions,
        buffers: FusionBuffers,
        finish: Finish,
        cuda_device: Callable[[], torch.device],
    ) -> None:
        self._cuda_device = cuda_device
        self._transport = transport
        self._finish = finish
        self._reductions = Reductions(
            transport=transport, streams=streams, completions=completions, buffers=buffers, finish=finish
        )
        self._movements = Movements(transport=transport, streams=streams, buffers=buffers, finish=finish)
        self._timeline = Timeline()

    def set_reduction(self, *, fusion_bytes: int, is_hierarchical: bool) -> None:
        """Set the maximum size of fusion buffers, and whether allreduces are hierarchical where they can be.

        All ranks call it in the same cycle.
        """
        self._reductions.fusion_bytes = fusion_bytes
        self._reductions.is_hierarchical = is_hierarchical

    def set_timeline(self, timeline: Timeline) -> None:
        """Set the timeline that records later operations."""
        self._timeline = self._reductions.timeline = timeline

    def run(self, operations: Sequence[tuple[Ready, Submission | None]]) -> None:
        """Begin all allreduces, packed into fusion buffers; then run the other operations in order.

        Args:
            operations: agreed operations of this rank's process sets, each with this rank's submission; None if
                this rank has joined, that is, has declared that it has no more data.

        Raises:
            RuntimeError: a process group is broken; `finish` is not called for the remaining operations.
        """
        # Allreduces first: they complete in another thread while this one runs the other operations.
        allreduces = [entry for entry in operations if entry[0].request.kind is CollectiveKind.ALLREDUCE]
        self._reductions.allreduce(
            [(ready, submission or self._neutral_submission(ready)) for ready, submission in allreduces]
        )
        timeline = self._timeline
        # If this rank has joined, only a barrier can run here. This rank has no submission then, so it has nothing to
        # send and no handle to finish.
        for ready, submission in operations:
            if ready.request.kind is not CollectiveKind.ALLREDUCE and submission is not None:
                timeline.begin([ready.key], ready.request.kind.value.upper())
                with profiled(ready.request.kind.value):
                    self._run(ready, submission)
                timeline.end([ready.key])

    def _run(self, ready: Ready, submission: Submission) -> None:
        match ready.request.kind:
            case CollectiveKind.ALLGATHER:
                self._movements.allgather(ready, submission)
            case CollectiveKind.BROADCAST:
                self._movements.broadcast(ready, submission)
            case CollectiveKind.ALLTOALL:
                self._movements.alltoall(ready, submission)
            case CollectiveKind.REDUCESCATTER:
                self._reductions.reducescatter(ready, submission)
            case CollectiveKind.ADD_PROCESS_SET:
                assert ready.value is not None
                assert ready.request.ranks is not None
                self._transport.add_process_set(ready.value, ready.request.ranks)
                self._finish(submission, ready.value)
            case CollectiveKind.REMOVE_PROCESS_SET:
                assert ready.value is not None
                self._transport.remove_process_set(ready.value)
                self._finish(submission, ready.value)
            case _:
                # A barrier or a join moves no data: it has finished when every rank has submitted it.
                self._finish(submission, ready.value)

    def _neutral_submission(self, ready: Ready) -> Submission:
        """Return a substitute for the missing submission to an allreduce; its values do not change the result."""
        request = ready.request
        device = self._cuda_device() if request.device_type == "cuda" else torch.device(request.device_type)
        tensors = tuple(
            torch.full(
                shape, _neutral_value(request.reduce_op, named_dtype(dtype)), dtype=named_dtype(dtype), device=device
            )
            for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
        )
        return Submission(
            request=request,
            inputs=tensors,
            outputs=tensors,
            cuda_ready=record_submission(device),
            handle=Handle(request.name),
            # No prescale factor: a negative one would turn infinity, the neutral value of Min, into -infinity.
            is_prescaled=True,
        )


def _neutral_value(op: ReduceOp | None, dtype: torch.dtype) -> float | int | bool:
    """Return the value that does not change the result of a reduction: 0 for sums, averages and Adasum."""
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    is_min = op is ReduceOp.MIN
    if dtype == torch.bool:
        return is_min
    if dtype.is_floating_point:
        return float("inf") if is_min else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if is_min else limits.min
