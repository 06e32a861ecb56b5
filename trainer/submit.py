"""Turns a call on tensors into a request and hands it to the engine. No gradients here: see ``autograd``.

Errors that only concern the calling rank are raised here as ``ValueError``, before the other ranks hear of
it.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer import runtime
from trainer.engine.execution import REDUCIBLE_DTYPES
from trainer.engine.handles import Handle, Result, Submission
from trainer.engine.requests import Kind, ReduceOp, Request
from trainer.engine.streams import record_submission

_counter = itertools.count(1)
_counted_round = 0


def submit_allreduce(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    name: str,
    op: ReduceOp,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    is_grouped: bool = False,
) -> Handle:
    """Reduces ``inputs`` over the ranks into ``outputs`` of equal shapes and dtypes, maybe the inputs.

    Raises:
        ValueError: no tensor, a dtype that cannot be reduced, a sparse tensor, or different devices.
    """
    if not inputs:
        raise ValueError(f"'{name}': a group needs at least one tensor")
    for tensor in inputs:
        if tensor.dtype not in REDUCIBLE_DTYPES:
            raise ValueError(f"'{name}': tensors of {tensor.dtype} cannot be reduced")
    request = Request(
        name=name,
        kind=Kind.ALLREDUCE,
        dtypes=tuple(_dtype_name(tensor) for tensor in inputs),
        shapes=tuple(tuple(tensor.shape) for tensor in inputs),
        device_type=_common_device(name, inputs).type,
        reduce_op=op,
        prescale_factor=float(prescale_factor),
        postscale_factor=float(postscale_factor),
        is_grouped=is_grouped,
    )
    return _submit(request, inputs, outputs, list(outputs) if is_grouped else outputs[0])


def submit_allgather(tensor: Tensor, *, name: str) -> Handle:
    """Concatenates the ranks' tensors along the first dimension, in rank order, into a new tensor."""
    request = Request(
        name=name,
        kind=Kind.ALLGATHER,
        dtypes=(_dtype_name(tensor),),
        shapes=(tuple(tensor.shape),),
        device_type=_common_device(name, [tensor]).type,
    )
    return _submit(request, [tensor], [], None)


def submit_broadcast(tensor: Tensor, output: Tensor, root_rank: int, *, name: str) -> Handle:
    """Writes the root's tensor into ``output``, which may be the tensor itself.

    Raises:
        ValueError: there is no such rank, or the tensor is sparse.
    """
    if not 0 <= root_rank < runtime.size():
        raise ValueError(f"'{name}': there is no root rank {root_rank} among {runtime.size()} ranks")
    request = Request(
        name=name,
        kind=Kind.BROADCAST,
        dtypes=(_dtype_name(tensor),),
        shapes=(tuple(tensor.shape),),
        device_type=_common_device(name, [tensor]).type,
        root_rank=root_rank,
    )
    return _submit(request, [tensor], [output], output)


def submit_barrier() -> Handle:
    """Finishes when every rank has submitted it."""
    return _submit(Request(name="barrier", kind=Kind.BARRIER), [], [], None)


def new_output(tensor: Tensor) -> Tensor:
    """Contiguous memory for a result of this tensor's shape and dtype, uninitialised."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def choose_name(kind: Kind, name: str | None) -> str:
    """The name among all ranks: the user's, or a count, equal if ranks make their calls in one order."""
    global _counter, _counted_round
    if name is not None:
        return f"{kind.value}.{name}"
    if runtime.num_inits() != _counted_round:
        _counter, _counted_round = itertools.count(1), runtime.num_inits()
    return f"{kind.value}.noname.{next(_counter)}"


def _submit(request: Request, inputs: Sequence[Tensor], outputs: Sequence[Tensor], result: Result) -> Handle:
    handle = Handle(request.name)
    # Detached, so that the engine's writes are invisible to autograd; in-place stays recognisable as
    # identity.
    detached = {id(tensor): tensor.detach() for tensor in (*inputs, *outputs)}
    submission = Submission(
        request=request,
        inputs=tuple(detached[id(tensor)] for tensor in inputs),
        outputs=tuple(detached[id(tensor)] for tensor in outputs),
        result=result,
        cuda_ready=record_submission(inputs[0].device) if inputs else None,
        handle=handle,
    )
    runtime.current_job().engine.submit(submission)
    return handle


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _common_device(name: str, tensors: Sequence[Tensor]) -> torch.device:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(f"'{name}': only dense tensors are supported, not {tensor.layout}")
        if tensor.device != tensors[0].device:
            raise ValueError(f"'{name}': tensors on {tensors[0].device} and {tensor.device} in one group")
    return tensors[0].device
