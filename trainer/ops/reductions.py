"""How values are combined, under Horovod's names."""

import warnings

from trainer.engine.requests import ReduceOp

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def choose_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """What two arguments, of which the first is deprecated, mean; Average where neither is given.

    Raises:
        ValueError: both are given.
    """
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("give either op or average, not both; average is deprecated")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum
