"""Errors that one rank hands to all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from datasvc.errors import DatasvcError


@contextmanager
def errors_that_travel() -> Iterator[None]:
    """Torch sends a rank's error to the others. One that cannot be unpickled there would leave them waiting."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DatasvcError) or type(error).__module__ == "builtins":
            raise
        raise DatasvcError(f"{type(error).__name__}: {error}") from error
