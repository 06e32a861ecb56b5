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

    After the first error no further call is begun, those under way are waited for, and the error is raised.
    """
    if len(arguments) <= 1:
        return [work(*each) for each in arguments]
    with ThreadPoolExecutor(min(threads, len(arguments)), thread_name_prefix="datasvc-tensor") as pool:
        futures = [pool.submit(work, *each) for each in arguments]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=False, cancel_futures=True)
    for future in done:
        future.result()
    return [future.result() for future in futures]
