"""The reductions, under Horovod's names, and the choice between Horovod's arguments `op` and `average`."""

from __future__ import annotations

import warnings

from datasvc.trainer.engine.negotiation.requests import ReduceOp

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def choose_op(average: bool | None, op: ReduceOp | None, *, stacklevel: int = 3) -> ReduceOp:
    """Return the reduction for the arguments `average` and `op`; Average if both are None.

    Args:
        average: deprecated argument; True for Average, False for Sum.
        op: one of the reductions of this module.
        stacklevel: number of stack frames up to the user's call; the deprecation warning names the line of this call.

    Raises:
        ValueError: both arguments are given, or `op` is not a reduction.
    """
    if op is not None and not isinstance(op, ReduceOp):
        raise ValueError(f"op must be one of hvd.Average, Sum, Adasum, Min, Max, Product, not {op!r}")
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("give either op or average, not both; average is deprecated")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=stacklevel)
    return Average if average else Sum
