"""Compares two model versions in a process of its own: torch and the tensors then take no memory of the caller.

The caller may be a server that runs for weeks: what a process has imported and allocated once, it mostly keeps.
"""

from __future__ import annotations

import pickle  # only between a process and its own child
import sys
from contextlib import closing

from datasvc.child_process import ChildProcess, end_with_input
from datasvc.errors import DatasvcError, UnavailableError
from datasvc.models.registry.diff import ModelDifference, diff
from datasvc.repository import Repository
from datasvc.repository.store.redaction import redact_url


def diff_in_process(url: str, a: str, b: str) -> ModelDifference:
    """Compare two versions, with the change of each tensor.

    Args:
        url: URL of the repository of both versions; it is only read.
        a: reference of the first version.
        b: reference of the second version.

    Raises:
        DatasvcError: see `diff`.
        UnavailableError: the process could not be started, or ended without a result, for example killed for memory.
    """
    try:
        child = ChildProcess(__name__, (url, a, b), answers=True)
    except OSError as error:
        raise UnavailableError(f"{a} and {b} were not compared: no process could be started: {error}") from error
    with closing(child):
        assert child.process.stdout is not None
        try:
            result = pickle.load(child.process.stdout)  # noqa: S301 - of our own child
        except (EOFError, pickle.UnpicklingError) as error:
            raise UnavailableError(
                f"the process that compared {a} and {b} ended without a result (status {child.process.wait()}); run "
                f"`datasvc models diff {a} {b} --repo {redact_url(url)}` to see why"
            ) from error
    if isinstance(result, DatasvcError):
        raise result
    assert isinstance(result, ModelDifference)
    return result


def main() -> None:
    """Run the comparison whose arguments are on standard input, and write its result to standard output."""
    url, a, b = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own parent
    end_with_input()
    result: ModelDifference | DatasvcError
    try:
        result = diff(Repository.open(url, read_only=True), a, b)
    except DatasvcError as error:
        result = error
    pickle.dump(result, sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
