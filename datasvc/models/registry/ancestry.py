"""Ancestry of model versions, read from the logs: a graph of versions and their parents.

Lineage and the search for the consumers of a sample use it. Removed versions are part of the graph, because a version
that continues a removed one has consumed its samples too. An invalid field or an unknown parent raises no error. It
becomes a *gap*: one line of text in `Version.gaps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.entry_fields import find_wrong_fields
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Repository
from datasvc.repository.logs.references import parse_reference

_DESCRIBED = ("message", "code", "environment", "origin")  # fields of an entry that describe the version

HISTORY = "history"
"""Field of an entry: the segments that ancestors outside its repository consumed, see `segments.history_of`."""


@dataclass(frozen=True)
class Version:
    """A version and its recorded origin.

    Attributes:
        name: name with version, such as "digits-cnn@3".
        entry: content of its log entry, without fields of a wrong type; {} if it cannot be read.
        uses: data that this version and earlier versions of its run read.
        parents: versions that it continues; the graph contains all of them.
        gaps: unknown parts of the origin, one line each: a missing parent, or an invalid field.
    """

    name: str
    entry: Mapping[str, Any]
    uses: tuple[DataUse, ...]
    parents: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        """Number of optimizer steps of its weights; None if it is not recorded."""
        step = self.entry.get("step")
        return step if type(step) is int else None  # `isinstance` would accept a boolean

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """Recorded consumption of ancestors outside this repository; invalid records are in `gaps` instead."""
        history = self.entry.get(HISTORY, ())
        return [item for item in history if isinstance(item, Mapping)] if isinstance(history, list) else ()


@dataclass
class Ancestry:
    """Versions and all their ancestors.

    Attributes:
        versions: by name, parents before children.
        requested: names of the requested versions, model by model, oldest first.
    """

    versions: dict[str, Version] = field(default_factory=dict)
    requested: list[str] = field(default_factory=list)

    def ancestors_of(self, name: str) -> Iterator[Version]:
        """Yield the ancestors of a version, each once, nearest first."""
        seen = {name}
        generation = list(self.versions[name].parents)
        while generation:
            older: list[str] = []
            for ancestor in generation:
                if ancestor not in seen:
                    seen.add(ancestor)
                    yield self.versions[ancestor]
                    older += self.versions[ancestor].parents
            generation = older


def read_ancestry(
    repository: Repository, refs: Sequence[str] = (), *, entries: EntryReader | None = None
) -> Ancestry:
    """Return versions with all their ancestors, across models.

    Args:
        repository: repository of the versions.
        refs: `NAME` for all versions of a model, removed ones included; `NAME@VERSION` or `NAME@TAG` for one version;
            () for all models.
        entries: cache of entries that several calls share.

    Raises:
        ConfigError: a reference is not valid.
        NotFoundError: a reference names no version.
        UnavailableError: the store does not respond.
    """
    reader = _AncestryReader(repository, entries or EntryReader(repository))
    names = [name for ref in (refs or repository.names("models")) for name in reader.names_of(ref)]
    requested = list(dict.fromkeys(names))
    return Ancestry(_sorted(reader.read_all(requested)), requested)


class _AncestryReader:
    """Reads versions and their parents from the logs; `entries` caches them."""

    def __init__(self, repository: Repository, entries: EntryReader) -> None:
        self._repository = repository
        self._entries = entries

    def names_of(self, ref: str) -> list[str]:
        """Return the names of the versions that `ref` refers to, oldest first."""
        reference = parse_reference(ref, "model")
        if reference.version is None and reference.tag is None:
            self._repository.resolve("models", ref, removed=True)  # raises NotFoundError for an unknown model
            return [f"{reference.name}@{number}" for number in self._entries.numbers(reference.name)]
        return [str(self._repository.resolve("models", ref, removed=True))]

    def read_all(self, names: Iterable[str]) -> dict[str, Version]:
        """Return these versions and all their ancestors, by name."""
        versions: dict[str, Version] = {}
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in versions:
                versions[name] = self._read(name)
                pending += versions[name].parents
        return versions

    def _read(self, name: str) -> Version:
        """Return a version; what is invalid in its entry becomes a gap."""
        model, _, number = name.partition("@")
        try:
            entry = self._entries.content(model, int(number))
        except (CorruptDataError, ConfigError) as error:
            return Version(name, {}, (), gaps=(str(error),))
        parents, gaps = self._parents(entry)
        history = entry.get(HISTORY, [])
        if not isinstance(history, list) or not all(isinstance(item, Mapping) for item in history):
            gaps.append("its record of the samples that ancestors in another repository consumed is not valid")
        try:
            uses = tuple(map(DataUse.from_dict, entry.get("data", ())))
        except (CorruptDataError, TypeError) as error:
            uses, gaps = (), [*gaps, str(error)]
        wrong_fields = find_wrong_fields(entry)
        # About the other fields of the origin, such as parents and data, the gaps above are more precise.
        gaps += [problem for field_name, problem in wrong_fields.items() if field_name in {"created", *_DESCRIBED}]
        checked = {field_name: value for field_name, value in entry.items() if field_name not in wrong_fields}
        return Version(name, checked, uses, tuple(parents), tuple(gaps))

    def _parents(self, entry: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the parents of a version, and a gap for each parent that is not known."""
        if HISTORY in entry:
            # The recorded parents are versions of another repository; here, their names may belong to other versions.
            return [], []
        parents: list[str] = []
        gaps: list[str] = []
        merged = entry.get("merged")
        refs = [entry.get("parent"), *(merged if isinstance(merged, list) else [])]
        for ref in (ref for ref in refs if ref is not None):
            try:
                parents.append(self._parent(ref))
            except (ConfigError, NotFoundError) as error:
                gaps.append(f"it continues {ref!r}, which is not in this repository: {error}")
        origin = entry.get("origin")
        foreign_parents = origin.get("parents") if isinstance(origin, Mapping) else None
        if isinstance(foreign_parents, list) and len(foreign_parents) > len(parents):
            names = ", ".join(map(str, foreign_parents))
            gaps.append(f"it continues {names} of another repository, and has no record of the samples they consumed")
        return list(dict.fromkeys(parents)), gaps

    def _parent(self, ref: Any) -> str:
        """Return the name, with version, of the parent that a log entry refers to."""
        if not isinstance(ref, str):
            raise ConfigError("a reference is a text")
        parent = parse_reference(ref, "model")
        if parent.version is None:
            # The log does not record which version the tag or the name resolved to at the time of the save.
            raise ConfigError("a parent without a version number is ambiguous")
        if parent.version not in self._entries.numbers(parent.name):
            raise NotFoundError(f"there is no version {parent.version} of {parent.name}")
        return f"{parent.name}@{parent.version}"


def _sorted(versions: dict[str, Version]) -> dict[str, Version]:
    """Return versions with parents before children; a cycle of parents is cut and recorded in `gaps`."""
    done: dict[str, Version] = {}
    on_path: set[str] = set()
    for root in sorted(versions, key=_model_and_number):
        stack = [root]  # not recursion: a history may be longer than Python's recursion limit
        while stack:
            name = stack[-1]
            if name in done:
                stack.pop()
                continue
            on_path.add(name)
            unfinished = [parent for parent in versions[name].parents if parent not in done]
            unvisited = [parent for parent in unfinished if parent not in on_path]
            if unvisited:
                stack += unvisited
                continue
            # Parents that are still unfinished are on the path, so they form a cycle with this version.
            done[name] = _without_parents(versions[name], unfinished)
            on_path.discard(name)
            stack.pop()
    return done


def _without_parents(version: Version, circular: Sequence[str]) -> Version:
    if not circular:
        return version
    parents = tuple(parent for parent in version.parents if parent not in circular)
    gap = f"it continues {', '.join(circular)}, which continues it: its ancestry is a cycle"
    return replace(version, parents=parents, gaps=(*version.gaps, gap))


def _model_and_number(name: str) -> tuple[str, int]:
    model, _, number = name.partition("@")
    return model, int(number)
