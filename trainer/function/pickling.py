"""Calls and answers as bytes. Only ever between processes of one job, which prove that they share its key."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from datasvc.trainer.errors import HorovodInternalError


class RankTracebackError(Exception):
    """What a rank's traceback said: the cause of the exception that came from there."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"\n\non rank {rank}:\n{text}")


@dataclass(frozen=True)
class CallResult:
    """What came of the call on one rank.

    `content` is the pickled result, or exception if it could be pickled and `text`, the traceback, is not empty.
    `worker` is the name of the process in an elastic job, where ranks change hands. `has_left` is True if the
    function ended that process with status 0 instead of returning.
    """

    rank: int
    content: bytes | None
    text: str = ""
    worker: str | None = None
    has_left: bool = False


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """A call as bytes.

    Raises:
        TypeError: it cannot be pickled.
    """
    if not _has_cloudpickle() and getattr(function, "__module__", None) == "__main__":
        raise TypeError(
            f"{function.__qualname__} is defined in the running script, where ranks cannot import it: "
            "pip install cloudpickle, or move it to a module"
        )
    try:
        return _dumps((function, args, dict(kwargs)))
    except Exception as error:
        raise TypeError(f"the function or its arguments cannot be sent to the ranks: {error}") from error


def call_pickled(content: bytes) -> Any:
    """Runs a call and returns its result; whatever it raises passes through."""
    function, args, kwargs = pickle.loads(content)  # noqa: S301 - from the launcher, which holds the key
    return function(*args, **kwargs)


def pickle_result(rank: int, result: object) -> CallResult:
    """A result as an answer.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return CallResult(rank, _dumps(result))
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank}, a {type(result).__qualname__}, cannot be pickled: {error}; "
            "return plain values, arrays or tensors"
        ) from error


def pickle_error(rank: int, error: BaseException) -> CallResult:
    """An exception as an answer, with its type if the other side can make it anew."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        error = HorovodInternalError(f"rank {rank} called sys.exit({error.code!r}) in the function")
    return CallResult(rank, _pickle_exception(error), text)


def unpickle_result(answer: CallResult) -> Any:
    """The result.

    Raises:
        TypeError: it cannot be made here.
    """
    assert answer.content is not None
    try:
        return pickle.loads(answer.content)  # noqa: S301 - from a rank, which has the key
    except Exception as error:
        raise TypeError(f"the result of rank {answer.rank} cannot be unpickled here: {error}") from error


def unpickle_error(answer: CallResult) -> BaseException:
    """The exception, caused by the rank's traceback."""
    error: object = None
    if answer.content is not None:
        try:
            error = _loads_exception(answer.content)
        except Exception:  # noqa: BLE001 - its module may be missing here; the text is left
            error = None
    if not isinstance(error, BaseException):
        error = HorovodInternalError(f"rank {answer.rank} failed: {answer.text.strip().splitlines()[-1]}")
    error.__cause__ = RankTracebackError(answer.rank, answer.text)
    return error


def _pickle_exception(error: BaseException) -> bytes | None:
    # Some go in but do not come out: pickle calls their class with what `args` happens to hold.
    for form in (error, _ExceptionParts(type(error), error.args, dict(error.__dict__))):
        # Foreign exceptions may do anything.
        with contextlib.suppress(Exception):
            content = _dumps(form)
            if isinstance(_loads_exception(content), type(error)):
                return content
    return None


def _loads_exception(content: bytes) -> object:
    value = pickle.loads(content)  # noqa: S301 - from a rank, which has the key
    return value.make() if isinstance(value, _ExceptionParts) else value


@dataclass(frozen=True)
class _ExceptionParts:
    """What an exception is made of."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    def make(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        error.__dict__.update(self.state)
        return error


def _has_cloudpickle() -> bool:
    import importlib.util

    return "cloudpickle" in sys.modules or importlib.util.find_spec("cloudpickle") is not None


def _dumps(value: object) -> bytes:
    if not _has_cloudpickle():
        return pickle.dumps(value)
    import cloudpickle  # type: ignore[import-untyped]  # has no types

    buffer = io.BytesIO()
    cloudpickle.CloudPickler(buffer).dump(value)
    return buffer.getvalue()
