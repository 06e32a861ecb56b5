"""A store in memory, at a URL of its own, that fails on request and records its requests."""

from __future__ import annotations

import fnmatch
import io
import secrets
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Operation = Literal["read", "write", "list", "info", "delete"]
Effect = Literal["refused", "unanswered", "silent"]

_SCHEME: Final = "faulty"


class StoreRequest(NamedTuple):
    """One request to a store.

    Attributes:
        operation: kind of the request.
        path: path below the store's URL.
    """

    operation: Operation
    path: str


@dataclass
class _Fault:
    operation: Operation
    pattern: str
    remaining: int | None
    effect: Effect
    error: Exception


class FaultyStore:
    """A store of its own in the memory of this process; `url` names it wherever a URL is taken.

    Its errors reach the caller at once: reads of it are not retried. Create-only writes are atomic. Safe for threads;
    use it as a context manager, which removes its files at the end.

    Args:
        creates_exclusively: False: the store overwrites where it is asked to create, as a store of an old version
            may.

    Attributes:
        url: URL of the store.
        requests: all requests so far, in their order.
    """

    def __init__(self, *, creates_exclusively: bool = True) -> None:
        self._name = secrets.token_hex(8)
        self.url = f"{_SCHEME}://{self._name}"
        self.requests: list[StoreRequest] = []
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
        """Let requests fail from now on. The first fault that fits a request decides.

        Args:
            operation: kind of the requests.
            path: pattern of the paths below the URL, with `*` and `?`, as in "objects/*".
            times: number of requests that fail; None: all.
            effect: "refused": nothing is done. "unanswered": it is done, and its answer is lost. "silent": no error,
                but a write stores nothing and a read returns the first half of its bytes.
            error: error that the driver raises; default: an OSError.
        """
        error = error or OSError(f"injected fault: {operation}")
        with self._lock:
            self._faults.append(_Fault(operation, path, times, effect, error))

    def heal(self) -> None:
        """Let no further request fail."""
        with self._lock:
            self._faults.clear()

    def damage(self, path: str, offset: int = -1) -> None:
        """Flip one bit of a stored file; a negative `offset` counts from its end."""
        content = _FaultyDriver.store[f"/{self._name}/{path}"].getbuffer()
        content[offset] ^= 1

    def remove(self, path: str) -> None:
        """Remove a stored file, as another process may."""
        del _FaultyDriver.store[f"/{self._name}/{path}"]

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

    def _begin(self, operation: Operation, path: str) -> _Fault | None:
        """Record a request, and return the fault that it meets; raise the error of a refused one."""
        with self._lock:
            self.requests.append(StoreRequest(operation, path))
            fault = next((fault for fault in self._faults if _fits(fault, operation, path)), None)
            if fault is not None and fault.remaining is not None:
                fault.remaining -= 1
        if fault is not None and fault.effect == "refused":
            raise fault.error
        return fault


def _fits(fault: _Fault, operation: Operation, path: str) -> bool:
    return fault.operation == operation and fault.remaining != 0 and fnmatch.fnmatchcase(path, fault.pattern)


_stores: weakref.WeakValueDictionary[str, FaultyStore] = weakref.WeakValueDictionary()


def _begin(operation: Operation, path: str) -> _Fault | None:
    name, _, below = path.strip("/").partition("/")
    store = _stores.get(name)
    return None if store is None else store._begin(operation, below)  # noqa: SLF001 - same module


class _FaultyDriver(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    # With "memory" among its protocols its reads are not retried. `pipe_file` is inherited and not overridden: only
    # then are create-only writes accepted as atomic, see `exclusive_create`.
    protocol: ClassVar[tuple[str, ...]] = (_SCHEME, "memory")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace(f"{_SCHEME}://", "") if isinstance(path, str) else path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        fault = _begin("read", self._strip_protocol(path))
        content: bytes = super().cat_file(path, start, end, **options)
        return content if fault is None else _half_of(content, fault)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            fault = _begin("read", path)
            content = super()._open(path, mode, **options).getvalue()
            # Readers share the stored object, and its position; each gets a copy.
            return io.BytesIO(content if fault is None else _half_of(content, fault))
        fault = _begin("write", path)
        if fault is not None and fault.effect == "silent":
            return io.BytesIO()
        store = _stores.get(path.strip("/").partition("/")[0])
        if store is not None and not store.creates_exclusively:
            mode = mode.replace("x", "w")
        opened = super()._open(path, mode, **options)
        if fault is not None:
            raise fault.error
        return opened

    def put_file(self, lpath: Any, rpath: str, *_callback: Any, **_options: Any) -> None:
        # In one request, so that a fault stores all of the file or nothing.
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        _answer(_begin("list", self._strip_protocol(path)))
        return super().ls(path, detail=detail, **options)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        _answer(_begin("list", self._strip_protocol(path)))
        return super().find(path, *arguments, **options)

    def info(self, path: str, **options: Any) -> Any:
        _answer(_begin("info", self._strip_protocol(path)))
        return super().info(path, **options)

    def _rm(self, path: str) -> None:
        fault = _begin("delete", self._strip_protocol(path))
        if fault is None or fault.effect == "unanswered":
            super()._rm(path)
        _answer(fault)


def _answer(fault: _Fault | None) -> None:
    if fault is not None and fault.effect == "unanswered":
        raise fault.error


def _half_of(content: bytes, fault: _Fault) -> bytes:
    if fault.effect == "silent":
        return content[: len(content) // 2]
    raise fault.error
