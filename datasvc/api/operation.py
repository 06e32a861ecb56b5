"""Base class of `repo.datasets` and `repo.models`, and the descriptor that turns library functions into methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from datasvc.repository import Entry, Kind, Repository, Resolved
from datasvc.repository.removal import LostVersions, mark_lost
from datasvc.repository.store.redaction import redact_url

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class HasRepository(Protocol):
    """An object with a repository. `Operation` passes the repository to the function of each method."""

    repository: Repository


class Operation(Generic[P, R_co]):
    """Descriptor that makes a function or class a method of an object with a repository.

    `repo.datasets.ingest(source, ...)` calls `ingest(repository, source, ...)`. The method has the signature and the
    docstring of the function, so `help(repo.datasets.ingest)`, editors and type checkers show every argument.
    """

    def __init__(self, function: Callable[Concatenate[Repository, P], R_co]) -> None:
        self.function = function

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Repository, P], R_co]: ...
    @overload
    def __get__(self, instance: HasRepository, owner: type) -> Callable[P, R_co]: ...

    def __get__(self, instance: HasRepository | None, owner: type) -> Callable[..., R_co]:
        if instance is None:  # accessed on the class, such as `Datasets.ingest`
            return self.function
        # A bound method, but with the repository in the place of `self`.
        return MethodType(self.function, instance.repository)


class Collection:
    """Base class of `Datasets` and `Models`: the names, versions and tags of one kind in a repository."""

    kind: ClassVar[Kind]

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    def __repr__(self) -> str:
        return f"datasvc.open({redact_url(self.repository.url)!r}).{self.kind}"

    def names(self) -> list[str]:
        """Return all names, sorted; see `Repository.names`."""
        return self.repository.names(self.kind)

    def versions(self, name: str) -> list[Resolved]:
        """Return the versions of `name` that are not removed, oldest first; [] if there are none."""
        return [Resolved(self.kind, name, number) for number in self.repository.living(self.kind, name)]

    def resolve(self, ref: str | Resolved, *, removed: bool = False) -> Resolved:
        """Return the version that `ref` refers to now; for arguments and errors, see `Repository.resolve`."""
        return self.repository.resolve(self.kind, ref, removed=removed)

    def tags(self, name: str) -> dict[str, int]:
        """Return the tags of `name`, each with the version that it points at."""
        return self.repository.tags(self.kind, name)

    def tag(self, ref: str, tag: str, *, expect: int | None = None) -> Resolved:
        """Point `tag` at the version that `ref` resolves to; for arguments and errors, see `Repository.tag`."""
        return self.repository.tag(self.kind, ref, tag, expect=expect)

    def untag(self, name: str, tag: str, *, expect: int | None = None) -> None:
        """Remove a tag but keep its history; for arguments and errors, see `Repository.untag`."""
        self.repository.untag(self.kind, name, tag, expect=expect)

    def mark_lost(self, refs: Sequence[str], *, force: bool = False, message: str = "") -> LostVersions:
        """Mark unreadable versions as lost; for arguments and errors, see `removal.mark_lost`."""
        return mark_lost(self.repository, self.kind, refs, force=force, message=message)

    def tag_history(self, name: str, tag: str) -> list[Entry]:
        """Return the history of a tag: an entry per move, oldest first; [] if the tag never existed."""
        return self.repository.tag_history(self.kind, name, tag)
