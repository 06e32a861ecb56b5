"""Questions that one rank asks for all, such as what the repository has at this moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import datasvc.trainer as hvd
from datasvc.models.saving.rank_channel import describe_error, raise_on_all_ranks

T = TypeVar("T")


def ask_first_rank(question: Callable[[], T], *, name: str) -> T:
    """Return on every rank what `question` gives on rank 0, or raise on every rank what it raises there.

    Every rank calls this, in the same order: none is left waiting for one that has failed.

    Args:
        question: called on rank 0 alone; its answer is pickled.
        name: of the exchange.

    Raises:
        DatasvcError: the question's own, or one that says what else it raised.
    """
    error: Exception | None = None
    answer: T | None = None
    if hvd.rank() == 0:
        try:
            answer = question()
        except Exception as failure:  # noqa: BLE001 - told to all ranks, and raised on all
            error = failure
    told, found = hvd.broadcast_object((describe_error(error), answer), name=name)
    raise_on_all_ranks([told], error)
    return cast("T", found)
