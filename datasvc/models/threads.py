"""Work on many pieces of tensors at once, that ends soon after the first failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import chain
from typing import Final, TypeVar, TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

# Below, to hand work to another thread, and to take turns with it, costs more than that thread helps.
_GROUP_BYTES: Final = 1 << 20


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


def run_by_size(
    work: Callable[[*_Arguments], _Result],
    arguments: Sequence[tuple[*_Arguments]],
    sizes: Sequence[int],
    threads: int,
) -> list[_Result]:
    """Do what `run_in_threads` does where calls are fast for the bytes they have to do with, `sizes`.

    Calls with few bytes are made by one thread one after another, and those with most come first, so that no thread
    is left with one at the end.
    """
    groups = plan_groups(sizes)
    done = run_in_threads(lambda group: [work(*arguments[n]) for n in group], [(group,) for group in groups], threads)
    results = dict(zip(chain.from_iterable(groups), chain.from_iterable(done), strict=True))
    return [results[number] for number in range(len(arguments))]


def plan_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Return the numbers of calls, the largest first, in groups that have few bytes or are one call."""
    groups: list[list[int]] = []
    group_bytes = 0
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if not groups or group_bytes + sizes[number] > _GROUP_BYTES:
            groups.append([])
            group_bytes = 0
        groups[-1].append(number)
        group_bytes += sizes[number]
    return groups
