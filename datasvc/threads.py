"""Runs functions in threads, or for a limited time, defers signals, registers hooks, and counts processors."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from itertools import starmap
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

from datasvc.sizes import group_by_size

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")

# `run_in_threads` groups consecutive small calls into one task of up to this many bytes. For fewer bytes, handing the
# work to another thread takes more time than the thread saves.
_GROUP_BYTES: Final = 1 << 20
# All but those for real time, which would double the time of `deferred_signals`.
_SIGNALS: Final = tuple(int(number) for number in signal.valid_signals() if number < signal.SIGRTMIN)


_CGROUP: Final = Path("/sys/fs/cgroup")

# The number of processes as launchers give it: torchrun and datasvc-run, Horovod, Open MPI, MPICH.
_SIZE_VARIABLES: Final = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's collector of cyclic garbage; for short work without I/O that makes many objects and no cycles.

    Each quarter of new objects starts a collection that visits all objects of the process. For a table of 20,000
    tensors, these took as long as the rest of a save. What another thread sets with `gc` meanwhile may be lost.
    """
    # A pause inside a pause finds the collector disabled, and leaves it to the outer one to enable it.
    was_enabled = gc.isenabled()
    if was_enabled:
        _pausing.add(threading.get_ident())
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _pausing.discard(threading.get_ident())
            gc.enable()


_pausing: Final[set[int]] = set()  # threads that have disabled the collector, and will enable it


def _collect_in_child() -> None:
    # A forked process, such as a worker of a loader, has only the thread that forked: no other ends its pause there.
    if _pausing:
        _pausing.clear()
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)


def run_in_threads(
    work: Callable[[*_Arguments], _Result],
    arguments: Sequence[tuple[*_Arguments]],
    threads: int,
    *,
    sizes: Sequence[int] | None = None,
) -> list[_Result]:
    """Call `work` with each of `arguments` in up to `threads` threads; return the results in the same order.

    After the first error, or an interrupt, no further call starts. When the running calls have ended, the error of
    the earliest call that failed is raised. For fast calls, pass the number of bytes that each one processes as
    `sizes`: consecutive small calls then run in one thread, one after the other.
    """
    groups: list[Sequence[tuple[*_Arguments]]]
    if sizes is None:
        # `zip` of one sequence wraps each element in a tuple of one: here, each call in a group of its own.
        groups = list(zip(arguments, strict=True))
    else:
        index_groups = group_by_size(range(len(arguments)), sizes.__getitem__, _GROUP_BYTES)
        groups = [arguments[indexes[0] : indexes[-1] + 1] for indexes in index_groups]
    if len(groups) <= 1:
        # One group would occupy one thread only, so this thread makes its calls.
        return list(starmap(work, arguments))
    stopped = threading.Event()

    def run_group(group: Sequence[tuple[*_Arguments]]) -> list[_Result]:
        results = []
        for call in group:
            # The results are then incomplete. No caller gets them: `run_in_threads` raises what stopped the calls.
            if stopped.is_set():
                break
            try:
                results.append(work(*call))
            except BaseException:
                stopped.set()
                raise
        return results

    pool = ThreadPoolExecutor(min(threads, len(arguments)), thread_name_prefix="datasvc-map")
    try:
        # In the context of the caller, so that what it sets for its calls holds in all threads.
        with deferred_signals():
            futures = [pool.submit(copy_context().run, run_group, group) for group in groups]
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        stopped.set()
        # A `with` block would run all calls to their end, even after Ctrl-C has ended the wait.
        pool.shutdown(wait=True, cancel_futures=True)
    for future in futures:
        if not future.cancelled():
            future.result()  # raises the error of the call
    return [result for future in futures for result in future.result()]


def map_in_threads(work: Callable[[_Value], _Result], values: Iterable[_Value], threads: int) -> list[_Result]:
    """Call `work` with each of `values`, as `run_in_threads` does; return the results in the same order."""
    # `zip` of one sequence wraps each value in a tuple of one: the arguments of a call.
    return run_in_threads(work, list(zip(values, strict=True)), threads)


def iterate_in_threads(
    work: Callable[[_Value], _Result], values: Sequence[_Value], threads: int
) -> Iterator[_Result]:
    """Yield `work` of each of `values`, in the same order; up to `threads` calls run at once.

    The calls are made in groups as they are needed, so memory holds a bounded number of results.
    """
    for start in range(0, len(values), threads):
        yield from map_in_threads(work, values[start : start + threads], threads)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Run the handlers of signals that come in this context after it; only the main thread runs any.

    Start threads in it. `Thread.start` takes a lock. If a handler raises there, for example KeyboardInterrupt, the
    lock may stay taken. Then the new thread never runs, and a wait for it never ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    replaced = {number: handler for number, handler in handlers.items() if callable(handler)}
    wakeup_fd = signal.set_wakeup_fd(-1)  # an event loop reads signals there, and would handle them twice
    try:
        for number in replaced:
            signal.signal(number, lambda number, _frame: came.append(number))
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_fd)
        with ExitStack() as stack:  # runs all handlers, also if one raises
            for pending in reversed(came):
                stack.callback(signal.raise_signal, pending)


def call_within(timeout_s: float, call: Callable[[], _Result]) -> _Result:
    """Return the result of `call`, which runs in a thread. Raises TimeoutError if that takes longer than `timeout_s`.

    The thread is not ended then; what `call` returns or raises later is dropped.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the top of a thread; the caller gets it
            future.set_exception(error)

    # A daemon, and no pool: the program would wait at its end for the threads of a pool.
    threading.Thread(target=copy_context().run, args=(run,), name="datasvc-call", daemon=True).start()
    return future.result(timeout_s)


def run_before_threads_end(hook: Callable[[], object]) -> None:
    """Call `hook` when the interpreter exits, before it waits for threads; `atexit` handlers run after this wait.

    The hook can still use thread pools. They are shut down by a hook of `concurrent.futures`, which runs later:
    Python runs hooks in the reverse order of registration, and that one was registered when this module was imported.
    """
    # `_register_atexit` is private and may disappear from Python. Then the hook is not called: the exit takes longer.
    if hasattr(threading, "_register_atexit"):
        threading._register_atexit(hook)  # noqa: SLF001


def count_processors(cgroup: Path = _CGROUP) -> int:
    """Return the number of processors in this process's affinity mask, or of all processors without such a mask.

    If a container limits the processor time, it is at most that many, rounded up. `cgroup` is where limits are.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, _read_limit(cgroup) or count)


def _read_limit(cgroup: Path) -> int | None:
    """Return how many processors the control group may use at a time, at least 1; None: there is no limit."""
    # Docker's --cpus and the limits of Kubernetes leave the affinity mask as it is: with a thread for each processor
    # in it, the kernel would stop all threads for most of the time. First the file of version 2, then those of 1.
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            quota_us, period_us = " ".join((cgroup / name).read_text("ascii") for name in names).split()
            return None if quota_us in {"max", "-1"} else max(1, -(-int(quota_us) // int(period_us)))
    return None


def count_launched(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the number of processes that a launcher has started with this one, and the variable that has it.

    Without a launcher: ("", 1).
    """
    name = next((name for name in _SIZE_VARIABLES if name in environ), None)
    # A batch script of Slurm has a SLURM_PROCID too, but only `srun` starts several processes.
    if name is None and "SLURM_PROCID" in environ:
        in_step = "SLURM_STEP_ID" in environ or environ.get("ENVIRONMENT") != "BATCH"
        names = ("SLURM_STEP_NUM_TASKS", *(["SLURM_NTASKS"] if in_step else []))
        name = next((name for name in names if name in environ), None)
    size = environ.get(name or "", "1")
    return (name, int(size)) if name is not None and size.isdecimal() else ("", 1)
