"""`Resolved`, one version of a data set or model, and `NameState`, all that a listing of its logs says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
        removed: numbers of the removed versions; without those that a tag points at, or at which a branch begins:
            their removal is not valid.
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
