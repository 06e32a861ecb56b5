"""Calls functions of a repository in a process of its own: torch and tensors then take no memory of the caller.

The caller may be a server that runs for weeks: what a process has imported and allocated once, it mostly keeps.
"""

from __future__ import annotations

import pickle  # only between a process and its own child
import sys
from contextlib import closing
from importlib import import_module
from typing import Any

from datasvc.child_process import ChildProcess, end_with_input
from datasvc.errors import DatasvcError, UnavailableError
from datasvc.repository.repository import Repository
from datasvc.repository.store.redaction import redact_url


def call_in_process(url: str, function: str, *arguments: object, command: str) -> Any:
    """Return the result of a function in a new process, which ends then.

    Args:
        url: URL of a repository, which is only read.
        function: "MODULE:NAME". Its first argument is the repository.
        arguments: its further arguments. They and the result must pickle.
        command: the command that does the same, for messages, without --repo.

    Raises:
        DatasvcError: see the function.
        UnavailableError: the process could not be started, or ended without a result, for example killed for memory.
    """
    try:
        child = ChildProcess(__name__, (url, function, arguments), answers=True)
    except OSError as error:
        raise UnavailableError(f"no process could be started for `{command}`: {error}") from error
    with closing(child):
        assert child.process.stdout is not None
        try:
            result = pickle.load(child.process.stdout)  # noqa: S301 - of our own child
        except (EOFError, pickle.UnpicklingError) as error:
            raise UnavailableError(
                f"a process ended without a result (status {child.process.wait()}); run `{command} --repo "
                f"{redact_url(url)}` to see why"
            ) from error
    if isinstance(result, DatasvcError):
        raise result
    return result


def main() -> None:
    """Call the function that standard input names, and write its result to standard output."""
    url, function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own parent
    end_with_input()
    module, _, name = function.partition(":")
    try:
        result = getattr(import_module(module), name)(Repository.open(url, read_only=True), *arguments)
    except DatasvcError as error:
        result = error
    pickle.dump(result, sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
