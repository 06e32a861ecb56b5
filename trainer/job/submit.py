"""Converts operations on tensors into submissions to the engine; used by `ops`, `gradients` and `optim`.

Invariant: an invalid argument raises an error here, before the engine sends a request to the other ranks. So the
error does not make the operations of the other ranks fail. The functions are not differentiable; see `ops.autograd`.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle, Result, Submission
from datasvc.trainer.engine.execution.movements import record_submission
from datasvc.trainer.engine.execution.reductions import split_rows
from datasvc.trainer.engine.execution.wire import REDUCIBLE_DTYPES
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp, Request
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set, members_of

# The end of the name of an unnamed operation, before its numbers; see `_Counts`.
_UNNAMED = ".noname."


@dataclasses.dataclass(kw_only=True)
class _Counts:
    """Numbers for the names of unnamed operations: `allreduce.noname.JOINS.COUNT`, equal on all ranks.

    Ranks that join early (see `submit_join`) count fewer operations. So after a join, all ranks count from 1 again.

    Attributes:
        init_number: value of `runtime.num_inits` when this object was created; each `init` gets a new object.
        num_joins: how often all ranks have joined since this `init`.
        counters: counter of each process set, by the number of the set.
    """

    init_number: int = 0
    num_joins: int = 0
    counters: dict[int, Iterator[int]] = dataclasses.field(default_factory=dict)


_counts = _Counts()


def submit_allreduce(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    name: str,
    op: ReduceOp,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    is_grouped: bool = False,
    is_prescaled: bool = False,
    process_set: ProcessSet = global_process_set,
    layout: int = 0,
    round: str = "",  # noqa: A002 - the name in `Request`
) -> Handle:
    """Start to reduce `inputs` over the ranks into `outputs`.

    Args:
        inputs: tensors of any shapes, at least one.
        outputs: tensors that receive the results, with the shapes and dtypes of the inputs; may be the inputs.
        name: name of the operation on all ranks.
        op: reduction, such as Sum or Average.
        prescale_factor: factor for each input before the reduction.
        postscale_factor: factor for the result of the reduction.
        is_grouped: whether `inputs` are a group. A group has a buffer of its own; single tensors may share a buffer.
        is_prescaled: whether `inputs` are multiplied by `prescale_factor` already. Only for groups, because a shared
            buffer is scaled as a whole.
        process_set: ranks that take part.
        layout: checksum of what the inputs consist of, see `Request`, compared between the ranks; 0 for no check.
        round: text that is compared between the ranks, see `Request`.

    Raises:
        TypeError: an input is not a tensor; the other functions of this module raise it too.
        ValueError: there is no tensor, a dtype that cannot be reduced, a sparse tensor, or tensors on different
            devices; an output cannot be overwritten; this rank is not in the set; Adasum does not support these
            arguments.
    """
    assert is_grouped or not is_prescaled, "single requests share a buffer, which is scaled as a whole"
    _check_reducible(name, inputs)
    _check_outputs(name, outputs)
    if op is ReduceOp.ADASUM:
        _check_adasum(name, inputs, process_set)
    request = _describe_request(
        CollectiveKind.ALLREDUCE,
        name,
        inputs,
        process_set,
        reduce_op=op,
        prescale_factor=float(prescale_factor),
        postscale_factor=float(postscale_factor),
        is_grouped=is_grouped,
        layout=layout,
        round=round,
    )
    result = list(outputs) if is_grouped else outputs[0]
    return _submit(request, inputs, outputs, result, is_prescaled=is_prescaled)


def submit_reducescatter(
    tensors: Sequence[Tensor],
    *,
    name: str,
    op: ReduceOp,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    is_grouped: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce the tensors over the ranks into new tensors with the rows of this rank.

    The arguments are those of `submit_allreduce`.

    Raises:
        ValueError: as for `submit_allreduce`, or a tensor has no dimensions.
        RuntimeError: `op` is neither Sum nor Average.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise RuntimeError(f"'{name}': reducescatter supports Sum and Average, not {op.value}")
    _check_reducible(name, tensors)
    for tensor in tensors:
        if tensor.ndim == 0:
            raise ValueError(f"'{name}': reducescatter needs tensors with at least one dimension, not a scalar")
    request = _describe_request(
        CollectiveKind.REDUCESCATTER,
        name,
        tensors,
        process_set,
        reduce_op=op,
        prescale_factor=float(prescale_factor),
        postscale_factor=float(postscale_factor),
        is_grouped=is_grouped,
    )
    members = members_of(process_set)
    rank_in_set = members.index(runtime.rank())
    local_rows = [split_rows(tensor.shape[0], len(members))[rank_in_set] for tensor in tensors]
    outputs = [
        new_output(tensor, (rows, *tensor.shape[1:])) for rows, tensor in zip(local_rows, tensors, strict=True)
    ]
    return _submit(request, tensors, outputs, outputs if is_grouped else outputs[0])


def submit_allgather(
    tensors: Sequence[Tensor],
    *,
    name: str,
    is_grouped: bool = False,
    process_set: ProcessSet = global_process_set,
    layout: int = 0,
    round: str = "",  # noqa: A002
) -> Handle:
    """Start to concatenate the tensors of the ranks along the first dimension, in rank order, into new tensors.

    The arguments are those of `submit_allreduce`. The tensors of the ranks may differ in the number of rows.

    Raises:
        ValueError: there is no tensor, a sparse tensor, or tensors on different devices; this rank is not in the set.
    """
    _check_not_empty(name, tensors)
    check_tensors(tensors)
    request = _describe_request(
        CollectiveKind.ALLGATHER, name, tensors, process_set, is_grouped=is_grouped, layout=layout, round=round
    )
    return _submit(request, tensors, [], None)


def submit_alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
    layout: int = 0,
    round: str = "",  # noqa: A002
) -> Handle:
    """Start to send rows of the tensor to the ranks; the result is a new tensor of the received rows, in rank order.

    The tensor has at least one dimension. `splits` is int32[size], the number of rows for each rank; None for equal
    parts. The other arguments are those of `submit_allreduce`.

    Raises:
        ValueError: `splits` is not int32, does not have one number per rank, has a negative number, or has a larger
            sum than there are rows; the rows cannot be divided equally; the tensor is sparse; this rank is not in the
            set.
    """
    check_tensors([tensor])
    if tensor.ndim == 0:
        raise ValueError(f"'{name}': alltoall needs a tensor with at least one dimension, not a scalar")
    request = _describe_request(CollectiveKind.ALLTOALL, name, [tensor], process_set, layout=layout, round=round)
    chosen_splits = _choose_splits(name, tensor.shape[0], splits, len(members_of(process_set)))
    request = dataclasses.replace(request, splits=chosen_splits)
    return _submit(request, [tensor], [], None)


def submit_broadcast(
    tensor: Tensor, output: Tensor, root_rank: int, *, name: str, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to write the tensor of the root into `output` on every rank.

    `output` has the shape and dtype of `tensor`, and may be `tensor` itself. `root_rank` is a global rank, not a rank
    within `process_set`. The other arguments are those of `submit_allreduce`.

    Raises:
        ValueError: the root or this rank is not in the set, the tensor is sparse, or `output` cannot be overwritten.
    """
    check_tensors([tensor])
    root_rank = operator.index(root_rank)
    request = _describe_request(CollectiveKind.BROADCAST, name, [tensor], process_set, root_rank=root_rank)
    _check_outputs(name, [output])
    if root_rank not in members_of(process_set):
        ranks = list(members_of(process_set))
        raise ValueError(f"'{name}': root rank {root_rank} must be one of the ranks {ranks} of the process set")
    return _submit(request, [tensor], [output], output)


def submit_barrier(process_set: ProcessSet = global_process_set) -> Handle:
    """Submit a barrier; it finishes when every rank of the set has submitted it."""
    return _submit(
        Request(name="barrier", kind=CollectiveKind.BARRIER, process_set=_checked_number(process_set)), [], [], None
    )


def submit_join() -> Handle:
    """Submit a join; it finishes when every rank has joined.

    Until then the engine of this rank takes part in the allreduces of the other ranks, with neutral values.
    """
    return _submit(Request(name="join", kind=CollectiveKind.JOIN), [], [], None)


def submit_process_set(ranks: Sequence[int], *, is_new: bool) -> Handle:
    """Submit the addition (`is_new`) or removal of a process set; every rank does so. The result is its number."""
    kind = CollectiveKind.ADD_PROCESS_SET if is_new else CollectiveKind.REMOVE_PROCESS_SET
    return _submit(Request(name=kind.value, kind=kind, ranks=tuple(ranks)), [], [], None)


def new_output(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return an uninitialized, contiguous tensor like `tensor`, with `shape` if it is given."""
    check_tensors([tensor])
    # The thread of the engine writes it outside inference mode, so it must not be an inference tensor.
    with torch.inference_mode(mode=False):
        return torch.empty(tensor.shape if shape is None else shape, dtype=tensor.dtype, device=tensor.device)


def check_tensors(values: Iterable[object]) -> None:
    """Raise TypeError if one of the values is not a tensor."""
    for value in values:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"expected a tensor, not {repr(value)[:80]}; convert numbers and arrays with torch.as_tensor"
            )


def choose_name(kind: CollectiveKind, name: str | None) -> str:
    """Return the name of an operation. If `name` is None, return a prefix, to which `_submit` appends numbers."""
    return f"{kind.value}{_UNNAMED}" if name is None else f"{kind.value}.{name}"


def restart_names() -> None:
    """Restart the numbering of unnamed operations after a join, see `_Counts`."""
    counts = _current_counts()
    counts.num_joins += 1
    counts.counters.clear()


def _describe_request(
    kind: CollectiveKind, name: str, tensors: Sequence[Tensor], process_set: ProcessSet, **options: Any
) -> Request:
    """Return the request for an operation on tensors; `options` are the fields of `Request` for this kind."""
    return Request(
        name=name,
        kind=kind,
        process_set=_checked_number(process_set),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device_type=_common_device(name, tensors).type,
        **options,
    )


def _submit(
    request: Request,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    result: Result,
    *,
    is_prescaled: bool = False,
) -> Handle:
    """Number an unnamed operation, and submit it. `result` is the handle's result; None: the engine creates it."""
    if request.name.endswith(_UNNAMED):
        # Count only here, after all checks: a call that fails on one rank must not shift its later names.
        counts = _current_counts()
        count = next(counts.counters.setdefault(request.process_set, itertools.count(1)))
        request = dataclasses.replace(request, name=f"{request.name}{counts.num_joins}.{count}")
    handle = Handle(request.name)
    # Detach the tensors, because autograd must not record the engine's writes. There is one detached tensor for each
    # tensor, so the input and output of an in-place operation remain the same object.
    detached = {id(tensor): tensor.detach() for tensor in (*inputs, *outputs)}
    submission = Submission(
        request=request,
        inputs=tuple(detached[id(tensor)] for tensor in inputs),
        outputs=tuple(detached[id(tensor)] for tensor in outputs),
        result=result,
        is_prescaled=is_prescaled,
        cuda_ready=record_submission(inputs[0].device) if inputs else None,
        handle=handle,
    )
    runtime.current_job().engine.submit(submission)
    return handle


def _current_counts() -> _Counts:
    """Return the counters since the last `init`."""
    # Both `_submit` and `restart_names` call this, because the first call after `init` may come from either.
    global _counts  # noqa: PLW0603 - of this process
    if _counts.init_number != runtime.num_inits():
        _counts = _Counts(init_number=runtime.num_inits())
    return _counts


def naming_round() -> tuple[int, int]:
    """Return two numbers that are equal on all ranks, and change with each `init` and each `join` of all ranks."""
    counts = _current_counts()
    return counts.init_number, counts.num_joins


def _checked_number(process_set: ProcessSet) -> int:
    """Check that this rank is a member of a process set, and return its number."""
    members = members_of(process_set)
    if runtime.rank() not in members:
        raise ValueError(f"rank {runtime.rank()} is not in {process_set}, and cannot take part in its operations")
    assert process_set.process_set_id is not None
    return process_set.process_set_id


def _check_not_empty(name: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError(f"'{name}': a group needs at least one tensor")


def _check_reducible(name: str, tensors: Sequence[Tensor]) -> None:
    _check_not_empty(name, tensors)
    check_tensors(tensors)
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE_DTYPES:
            raise ValueError(f"'{name}': tensors of {tensor.dtype} cannot be reduced; convert them to another dtype")


def _check_outputs(name: str, outputs: Sequence[Tensor]) -> None:
    for output in outputs:
        if output.is_inference():
            raise ValueError(
                f"'{name}': a tensor from inference mode cannot be overwritten; use an out-of-place operation"
            )
        # 1 means that some elements share memory.
        if torch._debug_has_internal_overlap(output) == 1:  # noqa: SLF001 - torch calls it for the same check
            raise ValueError(f"'{name}': an expanded tensor cannot be overwritten; use tensor.contiguous()")


def check_adasum_ranks(process_set: ProcessSet, prefix: str = "") -> None:
    """Check that Adasum can combine the ranks of a process set. Raise ValueError, with a message after `prefix`."""
    if process_set is not global_process_set:
        raise ValueError(f"{prefix}Adasum works with the global process set only, not with {process_set}")
    if not is_power_of_two(runtime.size()):
        raise ValueError(f"{prefix}Adasum needs a power of two as the number of ranks, not {runtime.size()}")


def is_power_of_two(num_ranks: int) -> bool:
    """Return whether Adasum, which combines ranks in pairs, can combine this number of ranks."""
    return num_ranks.bit_count() == 1


def _check_adasum(name: str, tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    check_adasum_ranks(process_set, f"'{name}': ")
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"'{name}': Adasum needs floating-point tensors, not {tensor.dtype}")


def _choose_splits(
    name: str, num_rows: int, splits: Tensor | Sequence[int] | None, num_ranks: int
) -> tuple[int, ...]:
    """Check `splits`, and return the number of rows for each rank; if `splits` is None, equal parts."""
    if splits is None:
        rows_per_rank, remainder = divmod(num_rows, num_ranks)
        if remainder:
            raise ValueError(f"'{name}': {num_rows} rows cannot be divided equally by {num_ranks} ranks; give splits")
        return (rows_per_rank,) * num_ranks
    if isinstance(splits, Tensor):
        if splits.dtype != torch.int32 or splits.ndim != 1:
            raise ValueError(f"'{name}': splits must be int32[size], not {splits.dtype}{list(splits.shape)}")
        splits = splits.tolist()
    try:
        chosen = tuple(operator.index(rows) for rows in splits)
    except TypeError as error:
        raise ValueError(f"'{name}': splits must be whole numbers, not {splits!r}") from error
    if len(chosen) != num_ranks:
        raise ValueError(f"'{name}': splits needs one number for each of {num_ranks} ranks, not {len(chosen)}")
    if min(chosen) < 0 or sum(chosen) > num_rows:
        raise ValueError(f"'{name}': splits {list(chosen)} cannot be taken from {num_rows} rows")
    return chosen


def _common_device(name: str, tensors: Sequence[Tensor]) -> torch.device:
    """Check that the tensors are dense and on one device, and return this device."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(f"'{name}': only dense tensors are supported, not {tensor.layout}")
        # The values of a wrapper, such as a quantised weight, are in other tensors: a copy into it can be lost.
        if tensor.data_ptr() == 0 and tensor.numel():
            raise ValueError(
                f"'{name}': a {type(tensor).__name__} on {tensor.device} has no memory of its own; send the tensors "
                "that it is made of"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"'{name}': a group has tensors on {tensors[0].device} and {tensor.device}; all must be on one device"
            )
    return tensors[0].device
