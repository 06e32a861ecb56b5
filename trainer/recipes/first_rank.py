"""Calls a function on rank 0 and returns its result on all ranks.

Runs use this to read from a repository that may change meanwhile, for example to get the newest version of a model:
the result must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import datasvc.trainer as hvd
from datasvc.models.saving.rank_channel import describe_error, raise_on_all_ranks

T = TypeVar("T")


def call_on_first_rank(function: Callable[[], T], *, name: str) -> T:
    """Call `function` on rank 0 and return its result on every rank, or raise its error on every rank.

    A collective: every rank calls this in the same order. The result is sent as a pickle, in a broadcast
    called `name`. A failure of `function` is sent too, so no rank waits forever.

    Raises:
        DatasvcError: `function` raised it, or raised an exception of another type, which the message describes.
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
