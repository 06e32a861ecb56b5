"""Work on many pieces of tensors at once, that ends soon after the first failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar, TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


def run_in_threads(
    work: Callable[[*_Arguments], _Result], arguments: Sequence[tuple[*_Arguments]], threads: int
) -> list[_Result]:
    """Call `work` with each of `arguments`; returns what it gave, in their order.

    After the first error, or an interrupt, no further call is begun; those under way are awaited, then it is raised.
    """
    if len(arguments) <= 1:
        return [work(*each) for each in arguments]
    pool = ThreadPoolExecutor(min(threads, len(arguments)), thread_name_prefix="datasvc-tensor")
    try:
        futures = [pool.submit(work, *each) for each in arguments]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        # As a context manager the pool would see every call through first, where Ctrl-C ends the wait.
        pool.shutdown(wait=True, cancel_futures=True)
    for future in done:
        future.result()
    return [future.result() for future in futures]
