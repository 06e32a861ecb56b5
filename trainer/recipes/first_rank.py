"""Calls a function on rank 0 and returns its result on all ranks.

All ranks get the same result even if the repository that the function reads changes meanwhile. For example, all ranks
load the same newest version of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import datasvc.trainer as hvd
from datasvc.models.saving.rank_channel import describe_error, raise_on_all_ranks

T = TypeVar("T")


def call_on_first_rank(function: Callable[[], T], *, name: str) -> T:
    """Call `function` on rank 0 and return its result on every rank, or raise its error on every rank.

    A collective: every rank must call this, in the same order among its collectives. A broadcast called `name` sends
    the result as a pickle. A failure of `function` is sent too, so no rank waits forever.

    Raises:
        DatasvcError: `function` failed; for its class, see `raise_on_all_ranks`.
    """
    error: Exception | None = None
    result: T | None = None
    if hvd.rank() == 0:
        try:
            result = function()
        except Exception as failure:  # noqa: BLE001 - raised on all ranks below
            error = failure
    description, result = hvd.broadcast_object((describe_error(error), result), name=name)
    raise_on_all_ranks([description], error)
    return cast("T", result)
