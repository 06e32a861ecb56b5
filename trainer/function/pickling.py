"""Pickles the calls, results and exceptions that `datasvc.trainer.run` sends between the launcher and the ranks.

cloudpickle writes the pickles, so functions of scripts, notebooks and closures can be sent. Invariant: a process
unpickles only data of its own job: `call_server` transfers a pickle only after both sides have proved that they have
the key of the job.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # has no types

from datasvc.trainer.errors import HorovodInternalError


class RankTracebackError(Exception):
    """The traceback of a rank as text; the cause of the exception from that rank."""

    def __init__(self, rank: int, text: str) -> None:
        # Python prints the name of this class before the message; the line breaks separate the two.
        super().__init__(f"\n\non rank {rank}:\n{text}")


@dataclass(frozen=True)
class CallResult:
    """The message by which a rank reports the result or the exception of the call.

    Attributes:
        content: pickled result or exception; None for an exception that cannot be pickled.
        text: traceback of the exception; empty for a result.
        worker: name of the process in an elastic job, where the rank may change; None in any other job.
        has_left: whether the function ended the process with status 0 instead of returning.
    """

    rank: int
    content: bytes | None
    text: str = ""
    worker: str | None = None
    has_left: bool = False


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return a pickle of a function and its arguments, for `call_pickled`.

    Raises:
        TypeError: the function or an argument cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps((function, args, dict(kwargs))))
    except Exception as error:
        raise TypeError(f"the function or its arguments cannot be sent to the ranks: {error}") from error


def call_pickled(content: bytes) -> Any:
    """Run a pickled call and return its result; its exceptions propagate."""
    function, args, kwargs = pickle.loads(content)  # noqa: S301 - from the launcher, which holds the key
    return function(*args, **kwargs)


def pickle_result(rank: int, result: object) -> CallResult:
    """Return the message that reports a result.

    Raises:
        TypeError: the result cannot be pickled.
    """
    try:
        return CallResult(rank, cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank}, a {type(result).__qualname__}, cannot be pickled: {error}; "
            "return plain values, arrays or tensors"
        ) from error


def pickle_error(rank: int, error: BaseException) -> CallResult:
    """Return the message that reports an exception, with its pickle if it can be both pickled and unpickled."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        # If `run` raised SystemExit in the process of the launcher, the program of the user would end.
        error = HorovodInternalError(f"rank {rank} called sys.exit({error.code!r}) in the function")
    return CallResult(rank, _pickle_exception(error), text)


def unpickle_result(answer: CallResult) -> Any:
    """Return the result that `answer` contains.

    Raises:
        TypeError: the result cannot be unpickled in this process.
    """
    assert answer.content is not None
    try:
        return pickle.loads(answer.content)  # noqa: S301 - from a rank, which has the key
    except Exception as error:
        raise TypeError(f"the result of rank {answer.rank} cannot be unpickled here: {error}") from error


def unpickle_error(answer: CallResult) -> BaseException:
    """Return the exception that `answer` reports; its cause is the traceback of the rank."""
    error: object = None
    if answer.content is not None:
        try:
            error = pickle.loads(answer.content)  # noqa: S301 - from a rank, which has the key
        except Exception:  # noqa: BLE001 - its module may be missing here; the traceback text remains
            error = None
    if not isinstance(error, BaseException):
        # The last line of a traceback is the type and the message of the exception.
        error = HorovodInternalError(f"rank {answer.rank} failed: {answer.text.strip().splitlines()[-1]}")
    error.__cause__ = RankTracebackError(answer.rank, answer.text)
    return error


def _pickle_exception(error: BaseException) -> bytes | None:
    """Return a pickle from which the exception can be rebuilt; None if there is none."""
    # pickle calls `type(error)(*error.args)`, which may fail. So unpickle each candidate here as a test.
    for candidate in (error, _ExceptionParts(error)):
        # The code of third-party exceptions may raise anything.
        with contextlib.suppress(Exception):
            content = bytes(cloudpickle.dumps(candidate))
            if isinstance(pickle.loads(content), type(error)):  # noqa: S301 - pickled in the line above
                return content
    return None


class _ExceptionParts:
    """A wrapper that pickles the parts of an exception; unpickling rebuilds the exception without its `__init__`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        args = self._error.args
        # pickle calls `_rebuild` with the second value, and sets the third one as attributes of the result.
        return _rebuild, (type(self._error), args), {**self._error.__dict__, "args": args}


def _rebuild(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an exception whose constructor was not called."""
    return kind.__new__(kind, *args)
