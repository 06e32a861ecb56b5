"""Turns a call on tensors into a request and hands it to the engine. No gradients here: see ``autograd``.

Errors that only concern the calling rank are raised here as ``ValueError``, before the other ranks hear of
it.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle, Result, Submission
from datasvc.trainer.engine.execution.rows import split_rows
from datasvc.trainer.engine.execution.streams import record_submission
from datasvc.trainer.engine.execution.wire import REDUCIBLE_DTYPES
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp, Request
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set, members_of

_UNNAMED = ".noname."


@dataclasses.dataclass(kw_only=True)
class _Counts:
    """Names made by counting since one ``init``.

    Attributes:
        num_inits: which ``init``.
        num_joins: how often all ranks have joined since.
        counters: of each process set, since the last of these.
    """

    num_inits: int = 0
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
) -> Handle:
    """Reduces ``inputs`` over the ranks into ``outputs`` of equal shapes and dtypes, maybe the inputs.

    Args:
        inputs: of any shapes.
        outputs: where the results go.
        name: the key among ranks.
        op: how to combine.
        prescale_factor: multiplies before.
        postscale_factor: multiplies after.
        is_grouped: whether the tensors are one operation that is packed by itself.
        is_prescaled: the inputs have been multiplied by the factor already; only grouped.
        process_set: the ranks.
        layout: checksum of what lies where in the inputs, which must be the same on every rank.

    Raises:
        ValueError: no tensor, a dtype that cannot be reduced, a sparse tensor, or different devices; this rank is
            not in the set; Adasum where it cannot be had.
    """
    assert is_grouped or not is_prescaled, "single requests share buffers, which are scaled as one"
    _check_reducible(name, inputs)
    _check_outputs(name, outputs)
    if op is ReduceOp.ADASUM:
        _check_adasum(name, inputs, process_set)
    request = Request(
        name=name,
        kind=CollectiveKind.ALLREDUCE,
        process_set=_number_of(process_set),
        dtypes=tuple(_dtype_name(tensor) for tensor in inputs),
        shapes=tuple(tuple(tensor.shape) for tensor in inputs),
        device_type=_common_device(name, inputs).type,
        reduce_op=op,
        prescale_factor=float(prescale_factor),
        postscale_factor=float(postscale_factor),
        is_grouped=is_grouped,
        layout=layout,
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
    """Reduces the tensors over the ranks into new ones that have this rank's rows.

    Raises:
        ValueError: as `submit_allreduce`; a tensor without dimensions.
        RuntimeError: an ``op`` other than Sum and Average.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise RuntimeError(f"'{name}': reducescatter knows Sum and Average, not {op.value}")
    _check_reducible(name, tensors)
    for tensor in tensors:
        if tensor.ndim == 0:
            raise ValueError(f"'{name}': a tensor without dimensions has no rows to scatter")
    device = _common_device(name, tensors)
    number, members = _number_of(process_set), members_of(process_set)
    place = members.index(runtime.rank())
    shares = [split_rows(tensor.shape[0], len(members))[place] for tensor in tensors]
    with torch.inference_mode(mode=False):
        outputs = [
            torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
            for rows, tensor in zip(shares, tensors, strict=True)
        ]
    request = Request(
        name=name,
        kind=CollectiveKind.REDUCESCATTER,
        process_set=number,
        dtypes=tuple(_dtype_name(tensor) for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device_type=device.type,
        reduce_op=op,
        prescale_factor=float(prescale_factor),
        postscale_factor=float(postscale_factor),
        is_grouped=is_grouped,
    )
    return _submit(request, tensors, outputs, outputs if is_grouped else outputs[0])


def submit_allgather(
    tensors: Sequence[Tensor], *, name: str, is_grouped: bool = False, process_set: ProcessSet = global_process_set
) -> Handle:
    """Concatenates the ranks' tensors along the first dimension, in rank order, into new tensors.

    Raises:
        ValueError: no tensor, a sparse tensor, or different devices; this rank is not in the set.
    """
    _check_any(name, tensors)
    request = Request(
        name=name,
        kind=CollectiveKind.ALLGATHER,
        process_set=_number_of(process_set),
        dtypes=tuple(_dtype_name(tensor) for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device_type=_common_device(name, tensors).type,
        is_grouped=is_grouped,
    )
    return _submit(request, tensors, [], None)


def submit_alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, *, name: str, process_set: ProcessSet = global_process_set
) -> Handle:
    """Deals the tensor's rows to the ranks of the set, and collects theirs, in rank order, in a new tensor.

    Args:
        tensor: one dimension or more.
        splits: int32, rows for each rank; None for equal parts.
        name: the key among ranks.
        process_set: the ranks.

    Raises:
        ValueError: splits that are not int32, not one per rank, below 0 or more than there are rows; rows that cannot
            be divided equally; a sparse tensor; this rank is not in the set.
    """
    number, num_ranks = _number_of(process_set), len(members_of(process_set))
    if tensor.ndim == 0:
        raise ValueError(f"'{name}': a tensor without dimensions has no rows to deal")
    request = Request(
        name=name,
        kind=CollectiveKind.ALLTOALL,
        process_set=number,
        dtypes=(_dtype_name(tensor),),
        shapes=(tuple(tensor.shape),),
        device_type=_common_device(name, [tensor]).type,
        splits=_choose_splits(name, tensor.shape[0], splits, num_ranks),
    )
    return _submit(request, [tensor], [], None)


def submit_broadcast(
    tensor: Tensor, output: Tensor, root_rank: int, *, name: str, process_set: ProcessSet = global_process_set
) -> Handle:
    """Writes the root's tensor into ``output``, which may be the tensor itself.

    Args:
        tensor: what the root has.
        output: of equal shape and dtype.
        root_rank: global rank, also in a process set.
        name: the key among ranks.
        process_set: the ranks.

    Raises:
        ValueError: the set has no such rank, or not this one, or the tensor is sparse.
    """
    number, members = _number_of(process_set), members_of(process_set)
    root_rank = operator.index(root_rank)
    _check_outputs(name, [output])
    if root_rank not in members:
        raise ValueError(f"'{name}': there is no root rank {root_rank} among the ranks {list(members)}")
    request = Request(
        name=name,
        kind=CollectiveKind.BROADCAST,
        process_set=number,
        dtypes=(_dtype_name(tensor),),
        shapes=(tuple(tensor.shape),),
        device_type=_common_device(name, [tensor]).type,
        root_rank=root_rank,
    )
    return _submit(request, [tensor], [output], output)


def submit_barrier(process_set: ProcessSet = global_process_set) -> Handle:
    """Finishes when every rank of the set has submitted it."""
    return _submit(
        Request(name="barrier", kind=CollectiveKind.BARRIER, process_set=_number_of(process_set)), [], [], None
    )


def submit_join() -> Handle:
    """Finishes when every rank has joined; until then this one takes part in allreduces without knowing of them."""
    return _submit(Request(name="join", kind=CollectiveKind.JOIN), [], [], None)


def submit_process_set(ranks: Sequence[int], *, is_new: bool) -> Handle:
    """Adds or removes a process set; finishes when every rank has asked for it, with its number."""
    kind = CollectiveKind.ADD_PROCESS_SET if is_new else CollectiveKind.REMOVE_PROCESS_SET
    return _submit(Request(name=kind.value, kind=kind, ranks=tuple(ranks)), [], [], None)


def new_output(tensor: Tensor) -> Tensor:
    """Contiguous memory for a result of this tensor's shape and dtype, uninitialised."""
    # The engine's thread writes it, and is not in inference mode.
    with torch.inference_mode(mode=False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def choose_name(kind: CollectiveKind, name: str | None) -> str:
    """The name among all ranks: the user's; without one a place for a count, which comes with the submission."""
    return f"{kind.value}{_UNNAMED}" if name is None else f"{kind.value}.{name}"


def restart_names() -> None:
    """Lets names made by counting begin anew: all ranks do so when all have joined, having made uneven numbers."""
    counts = _current_counts()
    counts.num_joins += 1
    counts.counters.clear()


def _submit(
    request: Request,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    result: Result,
    *,
    is_prescaled: bool = False,
) -> Handle:
    if request.name.endswith(_UNNAMED):
        # Counts calls with valid arguments, for each set: equal on its ranks if these make their calls in one order.
        counts = _current_counts()
        count = next(counts.counters.setdefault(request.process_set, itertools.count(1)))
        # With the number of joins, because an operation from before the last one may still travel.
        request = dataclasses.replace(request, name=f"{request.name}{counts.num_joins}.{count}")
    handle = Handle(request.name)
    # Detached, so that the engine's writes are invisible to autograd; in-place stays recognisable as
    # identity.
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
    # Whoever comes first after an `init` starts anew, be it an operation or a join: a rank may join before it has
    # submitted anything.
    global _counts  # noqa: PLW0603 - of this process
    if _counts.num_inits != runtime.num_inits():
        _counts = _Counts(num_inits=runtime.num_inits())
    return _counts


def _number_of(process_set: ProcessSet) -> int:
    members = members_of(process_set)
    if runtime.rank() not in members:
        raise ValueError(f"rank {runtime.rank()} is not in {process_set}, and cannot take part in its operations")
    assert process_set.process_set_id is not None
    return process_set.process_set_id


def _check_any(name: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError(f"'{name}': a group needs at least one tensor")


def _check_reducible(name: str, tensors: Sequence[Tensor]) -> None:
    _check_any(name, tensors)
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE_DTYPES:
            raise ValueError(f"'{name}': tensors of {tensor.dtype} cannot be reduced")


def _check_outputs(name: str, outputs: Sequence[Tensor]) -> None:
    for output in outputs:
        if output.is_inference():
            raise ValueError(
                f"'{name}': a tensor made in inference mode cannot be overwritten; use another operation"
            )
        if torch._debug_has_internal_overlap(output) == 1:  # noqa: SLF001 - torch asks so itself
            raise ValueError(f"'{name}': an expanded tensor cannot be overwritten; use tensor.contiguous()")


def _check_adasum(name: str, tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise ValueError(f"'{name}': Adasum is for all ranks, not for {process_set}")
    size = runtime.size()
    if size & (size - 1):
        raise ValueError(f"'{name}': Adasum needs a power of two of ranks, not {size}")
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"'{name}': Adasum is for floating-point tensors, not {tensor.dtype}")


def _choose_splits(
    name: str, num_rows: int, splits: Tensor | Sequence[int] | None, num_ranks: int
) -> tuple[int, ...]:
    if splits is None:
        share, rest = divmod(num_rows, num_ranks)
        if rest:
            raise ValueError(f"'{name}': {num_rows} rows cannot be dealt equally to {num_ranks} ranks; give splits")
        return (share,) * num_ranks
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


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _common_device(name: str, tensors: Sequence[Tensor]) -> torch.device:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(f"'{name}': only dense tensors are supported, not {tensor.layout}")
        if tensor.device != tensors[0].device:
            raise ValueError(f"'{name}': tensors on {tensors[0].device} and {tensor.device} in one group")
    return tensors[0].device
