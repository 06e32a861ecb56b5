"""Versions with all that they came from, read from the logs: the graph of who continues whom.

The entries of removed versions count: what continues them consumed what they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Repository
from datasvc.repository.logs.references import parse_reference

HISTORY = "history"
"""Field of an entry: what was consumed by ancestors that its repository does not have, see `history_of`."""


@dataclass(frozen=True)
class Version:
    """A version and what it says of where it came from.

    Attributes:
        name: "digits-cnn@3".
        entry: of the log.
        uses: data that it, and versions before it, used.
        parents: versions that it continues, all of them in the graph.
        gaps: what is not known of it, a line each: a parent that is not here, or a field that makes no sense.
    """

    name: str
    entry: Mapping[str, Any]
    uses: tuple[DataUse, ...]
    parents: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        """Optimizer steps behind it."""
        step = self.entry.get("step")
        return step if type(step) is int else None

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """What ancestors that are not here consumed; what makes no sense of it is among the gaps."""
        history = self.entry.get(HISTORY, ())
        return [each for each in history if isinstance(each, Mapping)] if isinstance(history, list) else ()


@dataclass
class Ancestry:
    """Versions and all their ancestors.

    Attributes:
        versions: by name, parents before children.
        asked: names of those that were asked for, model by model, oldest first.
    """

    versions: dict[str, Version] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def above(self, name: str) -> Iterator[Version]:
        """Yield the ancestors of a version, each once, nearest first."""
        seen = {name}
        line = list(self.versions[name].parents)
        while line:
            further: list[str] = []
            for each in line:
                if each not in seen:
                    seen.add(each)
                    yield self.versions[each]
                    further += self.versions[each].parents
            line = further


def read_ancestry(
    repository: Repository, refs: Sequence[str] = (), *, entries: EntryReader | None = None
) -> Ancestry:
    """Return versions with all their ancestors, of whatever models.

    Args:
        repository: where they are.
        refs: `NAME` for all versions of a model, removed ones too; `NAME@VERSION` or `NAME@TAG` for one; (): all.
        entries: of the repository, for who asks several times.

    Raises:
        ConfigError, NotFoundError: a reference is none, or names nothing.
        CorruptDataError, UnavailableError: an entry cannot be read.
    """
    reader = _AncestryReader(repository, entries or EntryReader(repository))
    asked = [name for ref in (refs or repository.names("models")) for name in reader.names_of(ref)]
    asked = list(dict.fromkeys(asked))
    return Ancestry(_sorted(reader.read_all(asked)), asked)


class _AncestryReader:
    def __init__(self, repository: Repository, entries: EntryReader) -> None:
        self._repository = repository
        self._entries = entries

    def names_of(self, ref: str) -> list[str]:
        wanted = parse_reference(ref, "model")
        if wanted.version is None and wanted.tag is None:
            self._repository.resolve("models", ref, removed=True)  # says what there is, where there is none
            return [f"{wanted.name}@{number}" for number in self._entries.numbers(wanted.name)]
        return [str(self._repository.resolve("models", ref, removed=True))]

    def read_all(self, names: Iterable[str]) -> dict[str, Version]:
        found: dict[str, Version] = {}
        line = list(names)
        while line:
            name = line.pop()
            if name not in found:
                found[name] = self._read(name)
                line += found[name].parents
        return found

    def _read(self, name: str) -> Version:
        model, _, number = name.partition("@")
        entry = self._entries.content(model, int(number))
        parents, gaps = self._parents(entry)
        history = entry.get(HISTORY, [])
        if not isinstance(history, list) or not all(isinstance(each, Mapping) for each in history):
            gaps.append("what it says of the history of versions that are not here makes no sense")
        try:
            uses = tuple(map(DataUse.from_dict, entry.get("data", ())))
        except (CorruptDataError, TypeError) as error:
            uses, gaps = (), [*gaps, str(error)]
        return Version(name, entry, uses, tuple(parents), tuple(gaps))

    def _parents(self, entry: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the versions that one continues, and why others are not known."""
        if HISTORY in entry:
            return [], []  # names of another repository
        parents: list[str] = []
        gaps: list[str] = []
        merged = entry.get("merged")
        named = [entry.get("parent"), *(merged if isinstance(merged, list) else [])]
        for ref in (ref for ref in named if ref is not None):
            try:
                parents += self._parent(ref)
            except (ConfigError, NotFoundError, TypeError) as error:
                gaps.append(f"it continues {ref!r}, which is not here: {error}")
        origin = entry.get("origin")
        left = origin.get("parents") if isinstance(origin, Mapping) else None
        if isinstance(left, list) and len(left) > len(parents):
            gaps.append(f"it continues {', '.join(map(str, left))} of another repository, and says nothing of it")
        return list(dict.fromkeys(parents)), gaps

    def _parent(self, ref: str) -> list[str]:
        wanted = parse_reference(ref, "model")
        if wanted.version is None:
            raise ConfigError("a name or tag may have meant any version when it was saved")
        if wanted.version not in self._entries.numbers(wanted.name):
            raise NotFoundError(f"there is no version {wanted.version} of {wanted.name}")
        return [f"{wanted.name}@{wanted.version}"]


def _sorted(versions: dict[str, Version]) -> dict[str, Version]:
    """Return versions with parents before children; where they form a circle, it is cut and said."""
    done: dict[str, Version] = {}
    under_way: set[str] = set()
    for root in sorted(versions, key=_by_number):
        line = [root]
        while line:
            name = line[-1]
            if name in done:
                line.pop()
                continue
            under_way.add(name)
            left = [parent for parent in versions[name].parents if parent not in done]
            open_ones = [parent for parent in left if parent not in under_way]
            if open_ones:
                line += open_ones
                continue
            done[name] = _without(versions[name], left)
            under_way.discard(name)
            line.pop()
    return done


def _without(version: Version, circular: Sequence[str]) -> Version:
    if not circular:
        return version
    parents = tuple(parent for parent in version.parents if parent not in circular)
    gaps = (*version.gaps, f"it continues {', '.join(circular)}, which continues it: one of the two cannot be")
    return Version(version.name, version.entry, version.uses, parents, gaps)


def _by_number(name: str) -> tuple[str, int]:
    model, _, number = name.partition("@")
    return model, int(number)
