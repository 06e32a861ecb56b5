"""`Resolved`, one version of a data set or model, and `NameState`, all that a listing of its logs says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from datasvc.errors import ConfigError, CorruptDataError, UnreadableVersionWarning
from datasvc.repository.logs.log import Entry

Kind = Literal["datasets", "models"]
KIND_NAMES: dict[Kind, str] = {"datasets": "data set", "models": "model"}


@dataclass(frozen=True)
class Resolved:
    """An immutable version: the result of `Repository.resolve`."""

    kind: Kind
    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class NameState:
    """Versions, tags, branches and removals of one data set or model, from one listing of its logs.

    Attributes:
        versions: numbers of all versions, ascending.
        tags: version that each tag points at; a tag that cannot be read is left out.
        removed: numbers of the removed versions, without those whose removal is not valid: tags point at them, or
            branches begin there.
        newest: newest version of the main line that is not removed; None if there is none, or it is not known.
        branches: head of each branch; a branch whose head is not known is left out.
    """

    versions: Sequence[int]
    tags: Mapping[str, int]
    removed: frozenset[int]
    newest: int | None
    branches: Mapping[str, int]

    @property
    def living(self) -> list[int]:
        """Numbers of the versions that are not removed, ascending."""
        return [number for number in self.versions if number not in self.removed]


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
