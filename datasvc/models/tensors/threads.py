"""Work on many pieces of tensors at once, that ends soon after the first failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import repeat
from typing import Final, TypeVar, TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

# Below, to hand work to another thread, and to take turns with it, costs more than that thread helps.
_GROUP_BYTES: Final = 1 << 20


def run_in_threads(
    work: Callable[[*_Arguments], _Result],
    arguments: Sequence[tuple[*_Arguments]],
    threads: int,
    *,
    sizes: Sequence[int] | None = None,
) -> list[_Result]:
    """Call `work` with each of `arguments`; returns what it gave, in their order.

    After the first error, or an interrupt, no further call is begun; those under way are awaited, then it is raised.

    Args:
        work: called from several threads.
        arguments: of each call.
        threads: at once.
        sizes: bytes that each call has to do with, where calls are fast for them: neighbours with few are made by one
            thread, one after another.
    """
    if len(arguments) <= 1:
        return [work(*each) for each in arguments]
    stopped = threading.Event()

    def work_on(group: Sequence[tuple[*_Arguments]]) -> list[_Result]:
        results = []
        for each in group:
            if stopped.is_set():
                break
            try:
                results.append(work(*each))
            except BaseException:
                stopped.set()
                raise
        return results

    pool = ThreadPoolExecutor(min(threads, len(arguments)), thread_name_prefix="datasvc-tensor")
    try:
        futures = [pool.submit(work_on, group) for group in _group(arguments, sizes)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        stopped.set()
        # As a context manager the pool would see every call through first, where Ctrl-C ends the wait.
        pool.shutdown(wait=True, cancel_futures=True)
    for future in done:
        future.result()
    return [result for future in futures for result in future.result()]


def _group(
    arguments: Sequence[tuple[*_Arguments]], sizes: Sequence[int] | None
) -> Iterator[Sequence[tuple[*_Arguments]]]:
    """Yield neighbours that together have few bytes; one by one where sizes are not known."""
    group: list[tuple[*_Arguments]] = []
    group_bytes = 0
    for each, size in zip(arguments, repeat(_GROUP_BYTES) if sizes is None else sizes, strict=False):
        if group and group_bytes + size > _GROUP_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(each)
        group_bytes += size
    if group:
        yield group
