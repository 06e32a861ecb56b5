"""Calls a function on rank 0 and returns its result on all ranks.

It is used for reads of the repository whose result must be equal on all ranks, such as the newest version of a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import datasvc.trainer as hvd
from datasvc.models.saving.rank_channel import describe_error, raise_on_all_ranks

T = TypeVar("T")


def call_on_first_rank(function: Callable[[], T], *, name: str) -> T:
    """Call `function` on rank 0 and return its result on every rank, or raise its error on every rank.

    A collective: every rank calls this in the same order. No rank hangs when rank 0 fails. The result is sent as a
    pickle, in a broadcast called `name`.

    Raises:
        DatasvcError: `function` raised this error, or another exception, which this error describes.
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
