"""Versions whose entry cannot be read: what a listing says of them, so that they do not hide the other versions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError, UnreadableVersionWarning
from datasvc.repository.logs.log import Entry
from datasvc.repository.resolved import Kind, Resolved


def describe_damage(version: Resolved, error: Exception) -> str:
    """Return the message for a version whose entry is damaged: `error`, and the command that gives the version up."""
    command = "datasvc models mark-lost" if version.kind == "models" else "datasvc mark-lost"
    return f"the entry of {version} cannot be read: {error}; if there is no copy, `{command} {version}` gives it up"


def warn_unreadable(version: Resolved, error: CorruptDataError | ConfigError) -> None:
    """Issue the warning that a listing leaves out a version; `error` has the reason."""
    warnings.warn(UnreadableVersionWarning(str(version), f"{version} is left out: {error}"), stacklevel=3)


def keep_valid(
    kind: Kind, name: str, entries: Iterable[Entry], check: Callable[[Mapping[str, Any], Resolved], object]
) -> list[Entry]:
    """Return the entries of `name` that `check` accepts; warn about those for which it raises CorruptDataError.

    `check` is called with the content of an entry and its version.
    """
    valid = []
    for entry in entries:
        version = Resolved(kind, name, entry.number)
        try:
            check(entry.content, version)
        except CorruptDataError as error:
            warn_unreadable(version, error)
        else:
            valid.append(entry)
    return valid
