"""The registry: which models there are, and what their versions say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from datasvc.errors import ConfigError
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Digest, Entry, Repository, Resolved
from datasvc.repository.logs.references import Reference, parse_reference
from datasvc.repository.objects.objects import parse_digest

_NAMES_AT_ONCE: Final = 16


@dataclass(frozen=True)
class ModelVersion:
    """What a version's entry says.

    Attributes:
        name: of the model.
        version: its number.
        tags: that stand on it now.
        entry: step, data, code, config, metrics, parent, digests.
        removed: whether only its entry is left.
    """

    name: str
    version: int
    tags: tuple[str, ...]
    entry: Mapping[str, Any]
    removed: bool = False

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def tensors(self) -> Digest:
        """Digest of the tensor table: equal for two versions exactly when all their tensors are equal."""
        return parse_digest(self.entry["tensors"])

    @property
    def parents(self) -> tuple[str, ...]:
        """What it was made from, as it was written: the version that its run continued first, then merged ones."""
        merged = self.entry.get("merged") or ()
        given = (self.entry.get("parent"), *(merged if isinstance(merged, list) else ()))
        return tuple(str(parent) for parent in given if parent)


def list_models(repository: Repository) -> list[ModelVersion]:
    """Return the newest version of every model, by name; models without a living one are left out.

    Raises:
        CorruptDataError, UnavailableError: see `Log.read`.
    """

    def newest(name: str) -> list[ModelVersion]:
        numbers = repository.living("models", name)[-1:]
        return _versions(repository, name, repository.versions("models", name).entries(numbers)) if numbers else []

    return [each for found in _each_name(repository, newest, repository.names("models")) for each in found]


def describe_model(repository: Repository, ref: str) -> ModelVersion:
    """Return one version, a removed one too. Raises as `Repository.resolve` and `Log.read`."""
    version = repository.resolve("models", ref, removed=True)
    (found,) = describe_versions(repository, [version])
    return found


def describe_versions(repository: Repository, versions: Sequence[Resolved]) -> list[ModelVersion]:
    """Return versions in their order, asking for tags and removals of each model once. Raises as `Log.read`."""
    numbers: dict[str, list[int]] = {}
    for version in versions:
        numbers.setdefault(version.name, []).append(version.version)

    def describe(name: str) -> list[ModelVersion]:
        return _versions(repository, name, repository.versions("models", name).entries(numbers[name]))

    described = _each_name(repository, describe, list(numbers))
    found = {(each.name, each.version): each for own in described for each in own}
    return [found[version.name, version.version] for version in versions]


def model_log(repository: Repository, name: str, *, last: int | None = None) -> list[ModelVersion]:
    """Return the `last` versions of a model, or all, oldest first, removed too. Raises as `Repository.entries`."""
    return _versions(repository, name, repository.entries("models", name, last=last))


def model_ancestry(repository: Repository, name: str, *, last: int | None = None) -> list[ModelVersion]:
    """Return every version of a model, and of others what it was made from, however far back; in no certain order.

    What a version says it was made from, but is not in this repository, is left out.

    Args:
        repository: where they are.
        name: of the model.
        last: only so many versions of it, the newest, and what these were made from in other models.

    Raises: as `Repository.entries`.
    """
    found = {(each.name, each.version): each for each in model_log(repository, name, last=last)}
    reader, live = EntryReader(repository), dict[str, _Live]()
    wanted = _missing_parents(found.values(), found)
    while wanted:
        others = (place for place in wanted if place[0] != name)  # of the model itself it has all that it wants
        here = sorted(place for place in others if place[1] in reader.numbers(place[0]))
        for other, number in here:
            if other not in live:
                live[other] = _read_live(repository, other)
            found[other, number] = _version(other, reader.entry(other, number), live[other])
        wanted = _missing_parents((found[place] for place in here), found)
    return list(found.values())


def version_named(text: str) -> tuple[str, int] | None:
    """Return name and number of the version that a parent's text names, None where it names none for certain."""
    try:
        named: Reference = parse_reference(text, "model")
    except ConfigError:
        return None
    return None if named.version is None else (named.name, named.version)


def _missing_parents(
    versions: Iterable[ModelVersion], found: Mapping[tuple[str, int], ModelVersion]
) -> set[tuple[str, int]]:
    named = {version_named(parent) for version in versions for parent in version.parents}
    return {place for place in named if place is not None and place not in found}


class _Live(NamedTuple):
    """What changes of a model without a new version: tags by the version they stand on, and what is removed."""

    tags: Mapping[int, Sequence[str]]
    removed: frozenset[int]


def _read_live(repository: Repository, name: str) -> _Live:
    tags: dict[int, list[str]] = {}
    for tag, version in repository.tags("models", name).items():
        tags.setdefault(version, []).append(tag)
    return _Live(tags, repository.removals("models", name).removed() - tags.keys())


def _versions(repository: Repository, name: str, entries: list[Entry]) -> list[ModelVersion]:
    live = _read_live(repository, name)
    return [_version(name, entry, live) for entry in entries]


def _version(name: str, entry: Entry, live: _Live) -> ModelVersion:
    tags = tuple(live.tags.get(entry.number, ()))
    return ModelVersion(name, entry.number, tags, entry.content, entry.number in live.removed)


def _each_name(
    repository: Repository, read: Callable[[str], list[ModelVersion]], names: Sequence[str]
) -> list[list[ModelVersion]]:
    if repository.storage.is_local or len(names) < 2:
        return list(map(read, names))
    with ThreadPoolExecutor(_NAMES_AT_ONCE, thread_name_prefix="datasvc-models") as pool:
        return list(pool.map(read, names))
