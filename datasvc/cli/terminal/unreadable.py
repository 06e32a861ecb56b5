"""Reports the versions that a command leaves out because they cannot be read.

The library issues an `UnreadableVersionWarning` for each. A command prints it as a line, ends with status 3, and adds
the version to its list of versions in JSON.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from datasvc.errors import CorruptDataError, UnreadableVersionWarning
from datasvc.printable import text_value

_left_out: ContextVar[dict[str, UnreadableVersionWarning] | None] = ContextVar("unreadable versions", default=None)


@contextmanager
def report_unreadable() -> Iterator[None]:
    """Print each version that the command leaves out, once, on standard error.

    A command that left out a version and has no other error ends with status 3.
    """
    left_out: dict[str, UnreadableVersionWarning] = {}  # by version

    def show(  # with the parameters of `warnings.showwarning`
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is UserWarning:  # of the library to its user: the place in its code says nothing
            sys.stderr.write(f"warning: {text_value(str(message))}\n")
        elif not isinstance(message, UnreadableVersionWarning):
            show_other(message, category, filename, lineno, file, line)
        elif message.version not in left_out:
            left_out[message.version] = message
            sys.stderr.write(f"warning: {text_value(str(message))}\n")

    token = _left_out.set(left_out)
    try:
        with warnings.catch_warnings():
            # By default, Python shows a warning only once per text and place in the code.
            warnings.simplefilter("always", UnreadableVersionWarning)
            show_other, warnings.showwarning = warnings.showwarning, show
            yield
    except SystemExit as end:
        # Typer ends each command with SystemExit, even a command that succeeds.
        if left_out and end.code in {None, 0}:
            sys.exit(CorruptDataError.exit_code)
        raise
    finally:
        _left_out.reset(token)


def unreadable_facts() -> list[dict[str, Any]]:
    """Return the versions that the command has left out so far as JSON values, for lists of versions."""
    return [warning.to_dict() for warning in (_left_out.get() or {}).values()]
