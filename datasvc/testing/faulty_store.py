"""Fakes for tests: a store in memory that fails on request and records its requests, and a clock."""

from __future__ import annotations

import fnmatch
import io
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, Self

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Operation = Literal["read", "write", "list", "info", "delete"]
Effect = Literal["refused", "unanswered", "silent"]

_SCHEME: Final = "faulty"


@dataclass
class _Fault:
    """The arguments of one call of `FaultyStore.fail`; `remaining` counts down from `times`; None: without end."""

    operation: Operation
    pattern: str
    remaining: int | None
    effect: Effect
    error: Exception


class FaultyStore:
    """A store in the memory of this process; pass its `url` wherever datasvc takes the URL of a store.

    datasvc does not retry reads of this store, so its errors reach the caller at once. The store is thread-safe. As a
    context manager, it removes its files at the end.

    Args:
        creates_exclusively: whether a create-only write fails if the file exists; if False, it overwrites the file,
            as on some stores.

    Attributes:
        url: URL of the store.
        requests: operation and path below the URL of all requests so far, in order.
    """

    def __init__(self, *, creates_exclusively: bool = True) -> None:
        self._name = secrets.token_hex(8)
        self.url = f"{_SCHEME}://{self._name}"
        self.requests: list[tuple[Operation, str]] = []
        self.creates_exclusively = creates_exclusively
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        fsspec.register_implementation(_SCHEME, _FaultyDriver, clobber=True)
        _stores[self._name] = self

    def fail(
        self,
        operation: Operation,
        path: str = "*",
        *,
        times: int | None = None,
        effect: Effect = "refused",
        error: Exception | None = None,
    ) -> None:
        """Let matching requests fail from now on. If several faults match a request, the first one applies.

        Args:
            operation: kind of the requests that fail.
            path: pattern of the paths below the URL, with `*` and `?`, as in "objects/*".
            times: number of matching requests that fail; None: all.
            effect: "refused": nothing is done, and `error` is raised. "unanswered": the request is done, but `error`
                is raised instead of its result. "silent": no error is raised, but a write stores nothing, a delete
                deletes nothing, and a read returns the first half of its bytes.
            error: error that the driver raises; default: an OSError.
        """
        error = error or OSError(f"injected fault: {operation}")
        with self._lock:
            self._faults.append(_Fault(operation, path, times, effect, error))

    def heal(self) -> None:
        """End all faults: no further request fails."""
        with self._lock:
            self._faults.clear()

    def damage(self, path: str, offset: int = -1) -> None:
        """Flip one bit of a stored file; a negative `offset` counts from its end."""
        _FaultyDriver.store[f"/{self._name}/{path}"].getbuffer()[offset] ^= 1

    def close(self) -> None:
        """Remove all files of the store."""
        for path in [path for path in _FaultyDriver.store if path.startswith(f"/{self._name}/")]:
            del _FaultyDriver.store[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, operation: Operation, path: str) -> _Fault | None:
        """Record a request, and return the fault that matches it, or None; raise the error of a refused request."""
        with self._lock:
            self.requests.append((operation, path))
            fault = next((fault for fault in self._faults if _matches(fault, operation, path)), None)
            if fault is not None and fault.remaining is not None:
                fault.remaining -= 1
        if fault is not None and fault.effect == "refused":
            raise fault.error
        return fault


def _matches(fault: _Fault, operation: Operation, path: str) -> bool:
    """Return whether a fault applies to a request; a fault with no remaining requests does not."""
    return fault.operation == operation and fault.remaining != 0 and fnmatch.fnmatchcase(path, fault.pattern)


class _Nested(threading.local):
    """Whether this thread is inside a request."""

    is_active = False


_nested = _Nested()
# The stores of this process by name. fsspec creates the driver objects, so a driver gets its store from here.
_stores: weakref.WeakValueDictionary[str, FaultyStore] = weakref.WeakValueDictionary()


def _request(operation: Operation, path: str, action: Callable[[], Any]) -> Any:
    """Record a request, and return the result of `action`, which executes it, or apply the fault that matches."""
    # `path` starts with the name of the store.
    name, _, path_in_store = path.strip("/").partition("/")
    store = _stores.get(name)
    fault = None if store is None else store._record(operation, path_in_store)  # noqa: SLF001 - same module
    if fault is not None and fault.effect == "silent" and operation in {"write", "delete"}:
        return io.BytesIO()  # a file that is never stored
    result = action()
    if fault is None:
        return result
    if fault.effect == "silent":
        return result[: len(result) // 2] if operation == "read" else result
    # The effect is "unanswered": the request was executed above.
    raise fault.error


class _FaultyDriver(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The fsspec driver of all stores. A path is the name of a store, a slash and the path in the store.

    Do not override `pipe_file`: `exclusive_create` would no longer treat create-only writes as atomic.
    """

    # datasvc does not retry reads of drivers with the protocol "memory".
    protocol: ClassVar[tuple[str, ...]] = (_SCHEME, "memory")
    # The files and folders of all stores, apart from those of fsspec's own memory driver.
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace(f"{_SCHEME}://", "") if isinstance(path, str) else path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        return _request("read", self._strip_protocol(path), partial(super().cat_file, path, start, end, **options))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path, open_file = self._strip_protocol(path), super()._open
        if mode == "rb":
            # Return a copy, because all readers of the stored file object would share its read position.
            return io.BytesIO(_request("read", path, lambda: open_file(path, mode, **options).getvalue()))
        store = _stores.get(path.strip("/").partition("/")[0])
        if store is not None and not store.creates_exclusively:
            mode = mode.replace("x", "w")  # overwrite instead of create-only
        return _request("write", path, partial(open_file, path, mode, **options))

    def put_file(self, lpath: Any, rpath: str, *_callback: Any, **_options: Any) -> None:
        # One request for the whole file, so that a fault affects the whole file.
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def ls(self, path: str, *arguments: Any, **options: Any) -> Any:
        list_folder = partial(super().ls, path, *arguments, **options)
        # Drivers before fsspec 2026.9 list folder by folder inside `find`, which is one request.
        return list_folder() if _nested.is_active else _request("list", self._strip_protocol(path), list_folder)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        find = super().find

        def list_tree() -> Any:
            _nested.is_active = True
            try:
                return find(path, *arguments, **options)
            finally:
                _nested.is_active = False

        return _request("list", self._strip_protocol(path), list_tree)

    def info(self, path: str, **options: Any) -> Any:
        return _request("info", self._strip_protocol(path), partial(super().info, path, **options))

    def _rm(self, path: str) -> None:
        _request("delete", self._strip_protocol(path), partial(super()._rm, path))


class FakeClock:
    """A clock at the time `now_s`, in seconds; pass it as an argument `clock`, in place of `time.monotonic`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the current time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Add to the time; `seconds` is not negative."""
        assert seconds >= 0, seconds
        self.now_s += seconds
