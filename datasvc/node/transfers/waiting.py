"""Wait for what other requests have in hand, and give up where nothing moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from datasvc.errors import UnavailableError

T = TypeVar("T")

PATIENCE_S: Final = 30.0
_LOOK_S = 1.0


async def wait_moving(future: asyncio.Future[T], *, idle_s: Callable[[], float], patience_s: float = PATIENCE_S) -> T:
    """Return the result of `future`, which goes on if this wait ends before.

    Args:
        future: what is waited for.
        idle_s: returns the seconds since what is waited for moved last.
        patience_s: how long it may stand still. It bounds a wait in a circle too, such as of a node that is
            configured to ask itself under another name.

    Raises:
        UnavailableError: it stood still for longer.
        BaseException: what the future raises.
    """
    while not future.done():
        await asyncio.wait([future], timeout=min(_LOOK_S, patience_s))
        if not future.done() and idle_s() > patience_s:
            raise UnavailableError(f"nothing moved for {patience_s:g} s; ask another node, or try again later")
    return future.result()
