"""Lets a request wait for a fetch (`Fetches.acquire`) or a free stream (`Sender.stream`) while there is progress.

Other requests may wait for the same fetch, so a wait that ends early does not cancel the fetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from datasvc.errors import UnavailableError

T = TypeVar("T")

STALL_TIMEOUT_S: Final = 30.0
# Progress does not wake the waiting coroutine, so the coroutine asks for the idle time at this interval.
_POLL_S = 1.0


async def wait_for_progress(
    future: asyncio.Future[T], *, idle_s: Callable[[], float], stall_timeout_s: float = STALL_TIMEOUT_S
) -> T:
    """Return the result of `future`, which is not cancelled if this wait ends first.

    Args:
        future: future to wait for.
        idle_s: returns the seconds since the last progress of the work.
        stall_timeout_s: maximum time without progress. It also ends a circular wait, such as that of a node that is
            configured to request objects from itself under another name.

    Raises:
        UnavailableError: there was no progress for longer than `stall_timeout_s`.
        BaseException: the exception of the future.
    """
    while not future.done():
        await asyncio.wait([future], timeout=min(_POLL_S, stall_timeout_s))
        if not future.done() and idle_s() > stall_timeout_s:
            raise UnavailableError(f"no progress for {stall_timeout_s:g} s; try another node, or try again later")
    return future.result()
