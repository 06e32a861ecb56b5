"""List models and describe their versions: log entries together with the current tags and removals.

A listing leaves out a version whose entry cannot be read or has a field of a wrong type, with an
`UnreadableVersionWarning`. The entries of all versions that this module returns are checked, see `entry_fields`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.search.index import map_models
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.artefacts import artefacts
from datasvc.models.versions.entry_fields import check_fields, tree_leaves, valid_entries
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Digest, Entry, Objects, Repository, Resolved
from datasvc.repository.logs.references import is_name, parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import NameState, warn_unreadable
from datasvc.shown import Shown, ShownTable, plot, rows_to_arrow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class ModelVersion(Shown):
    """A version of the model `name` with its entry and its current tags.

    Attributes:
        version: version number.
        tags: tags that currently point at the version.
        entry: content of its log entry: step, data, code, config, metrics, parent, digests.
        removed: whether the version was removed, so that only its entry remains.
    """

    name: str
    version: int
    tags: tuple[str, ...]
    entry: Mapping[str, Any]
    removed: bool = False

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata of the version as JSON values, as `datasvc models ls --json` prints them."""
        facts = {"name": self.name, "version": self.version, "tags": list(self.tags)}
        return facts | ({"removed": True} if self.removed else {}) | dict(self.entry)

    @property
    def tensors(self) -> Digest:
        """Digest of the tensor table. Versions with the same table have equal tensors; others may, too."""
        return parse_digest(self.entry["tensors"])

    @property
    def parents(self) -> tuple[str, ...]:
        """References of its parents, as recorded: first the version that its run continued, then merged ones."""
        merged = self.entry.get("merged") or ()
        recorded = (self.entry.get("parent"), *(merged if isinstance(merged, list) else ()))
        return tuple(str(parent) for parent in recorded if parent)


class ModelVersions(ShownTable, list[ModelVersion]):
    """A list of model versions, which a notebook shows as a graph, and which is a table and a plot on request."""

    def to_arrow(self) -> pa.Table:
        """Return a row for each version.

        Columns: `version`, `created`, `step`, `message`, `tags`, `removed`, `parents`, `data`, and one for each value
        of metrics and configuration, such as `metrics.loss`.
        """
        return rows_to_arrow(
            [
                {
                    "version": str(version),
                    "created": version.entry["created"],
                    "step": version.entry["step"],
                    "message": version.entry["message"],
                    "tags": list(version.tags),
                    "removed": version.removed,
                    "parents": list(version.parents),
                    "data": sorted({str(use["dataset"]) for use in version.entry["data"]}),
                }
                | dict(tree_leaves(version.entry["metrics"] or {}, "metrics"))
                | dict(tree_leaves(version.entry["config"] or {}, "config"))
                for version in self
            ]
        )

    def plot(self, metric: str, *, ax: Axes | None = None) -> Axes:
        """Plot a metric over the steps of the versions, a line for each model; return the axes of matplotlib.

        Args:
            metric: name of the metric; versions without it are gaps.
            ax: axes to plot into; None for a new figure.

        Raises:
            ConfigError: matplotlib is not installed, or no version has the metric.
        """
        return plot(self, metric, ax=ax)


def list_models(repository: Repository) -> ModelVersions:
    """Return the newest version of every model, sorted by name; models whose versions are all removed are left out.

    A model whose newest version cannot be read is left out with a warning.

    Raises:
        CorruptDataError, UnavailableError: the removals cannot be read.
    """

    def newest(name: str) -> list[ModelVersion]:
        state = repository.state("models", name)
        newest_number = state.living[-1:]
        entries = repository.readable_entries("models", name, newest_number) if newest_number else []
        return _versions(name, entries, state)

    names = [name for name in repository.storage.list("models") if is_name(name)]
    newest_of_each = map_models(repository, newest, names)
    return ModelVersions(version for versions in newest_of_each for version in versions)


def describe_model(repository: Repository, ref: str) -> ModelVersion:
    """Return one version, which may be removed. Raise the errors of `Repository.resolve` and `Log.read`."""
    version, state = repository.resolve_with_state("models", ref, removed=True)
    entry = repository.entry(version)
    check_fields(entry.content, version)
    return _version(version.name, entry, state)


def show_facts(repository: Repository, version: ModelVersion) -> dict[str, Any]:
    """Return metadata, artefacts and removal of a version, as `datasvc models show --json` prints them.

    Raises CorruptDataError or UnavailableError: the artefacts or the removal cannot be read.
    """
    removal = repository.removals("models", version.name).find(version.version) if version.removed else None
    attached = artefacts(repository, Resolved("models", version.name, version.version))
    return (
        version.to_dict()
        | ({"artefacts": [artefact.to_dict() for artefact in attached]} if attached else {})
        | ({"removal": dict(removal.content)} if removal else {})
    )


def describe_versions(repository: Repository, versions: Sequence[Resolved]) -> ModelVersions:
    """Return `versions` in their order, without those that cannot be read; raise UnavailableError.

    Tags and removals are read once per model.
    """
    numbers: dict[str, list[int]] = {}
    for version in versions:
        numbers.setdefault(version.name, []).append(version.version)

    def describe(name: str) -> list[ModelVersion]:
        entries = repository.readable_entries("models", name, numbers[name])
        return _versions(name, entries, repository.state("models", name))

    described = {
        (version.name, version.version): version
        for versions_of_model in map_models(repository, describe, numbers)
        for version in versions_of_model
    }
    keys = [(version.name, version.version) for version in versions]
    return ModelVersions(described[key] for key in keys if key in described)


def model_log(repository: Repository, name: str, *, last: int | None = None) -> ModelVersions:
    """Return all or the `last` versions of a model, oldest first, with removed ones; see `Repository.entries`."""
    entries = repository.entries("models", name, last=last)
    return ModelVersions(_versions(name, entries, repository.state("models", name)))


def model_ancestry(repository: Repository, name: str, *, last: int | None = None) -> list[ModelVersion]:
    """Return all or the `last` versions of a model, and their ancestors in other models, in unspecified order.

    Parents that are not in this repository are left out. Errors are those of `Repository.entries`.
    """
    versions = {(version.name, version.version): version for version in model_log(repository, name, last=last)}
    reader, state_of = EntryReader(repository), dict[str, NameState]()
    unreadable: set[tuple[str, int]] = set()
    missing = _missing_parents(versions.values(), versions)
    while missing:
        others = (key for key in missing if key[0] != name)  # not those of the model itself, which `last` limits
        existing = sorted(key for key in others if key[1] in reader.numbers(key[0]))
        for other, number in existing:
            if other not in state_of:
                state_of[other] = repository.state("models", other)
            try:
                entry = reader.entry(other, number)
                check_fields(entry.content, f"{other}@{number}")
            except CorruptDataError as error:
                warn_unreadable(Resolved("models", other, number), error)
                unreadable.add((other, number))
            else:
                versions[other, number] = _version(other, entry, state_of[other])
        newest = (versions[key] for key in existing if key in versions)
        missing = _missing_parents(newest, versions) - unreadable
    return list(versions.values())


def parse_version(text: str) -> tuple[str, int] | None:
    """Return name and number of the version in a parent's reference; None if it has no version number."""
    try:
        reference = parse_reference(text, "model")
    except ConfigError:
        return None
    return None if reference.version is None else (reference.name, reference.version)


def _missing_parents(
    versions: Iterable[ModelVersion], present: Mapping[tuple[str, int], ModelVersion]
) -> set[tuple[str, int]]:
    parents = {parse_version(parent) for version in versions for parent in version.parents}
    return {key for key in parents if key is not None and key not in present}


def _versions(name: str, entries: list[Entry], state: NameState) -> list[ModelVersion]:
    return [_version(name, entry, state) for entry in valid_entries(name, entries)]


def _version(name: str, entry: Entry, state: NameState) -> ModelVersion:
    tags = tuple(tag for tag, version in state.tags.items() if version == entry.number)
    return ModelVersion(name, entry.number, tags, entry.content, entry.number in state.removed)


@dataclass(frozen=True)
class StoredSize:
    """Size of the tensors of a version.

    Attributes:
        tensor_bytes: bytes in memory.
        stored_bytes: stored bytes that a restore reads. Several versions may share them.
        num_objects: number of objects that contain these bytes.
        num_chunks: number of chunks, which are stored and verified separately.
        chain_lengths: number of chunks by the number of links that a restore decodes: 1 for a chunk that is stored
            whole, and one more for each difference.
    """

    tensor_bytes: int
    stored_bytes: int
    num_objects: int
    num_chunks: int
    chain_lengths: Mapping[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON values."""
        return {**vars(self), "chain_lengths": {str(length): num for length, num in self.chain_lengths.items()}}


def stored_size(repository: Repository, ref: str) -> StoredSize:
    """Return how a model version is stored; no tensor is read.

    Raises:
        NotFoundError: there is no such version, or it was removed.
        CorruptDataError, UnavailableError: its entry or its table of tensors cannot be read.
    """
    version = describe_model(repository, ref)
    if version.removed:
        raise NotFoundError(f"{version} was removed, so gc may have deleted its bytes")
    return measure_stored_size(repository.objects, version.tensors)


def measure_stored_size(objects: Objects, table: Digest) -> StoredSize:
    """Return the size of a version by its tensor table; no tensor is read.

    Raises:
        NotFoundError, CorruptDataError, UnavailableError: the table cannot be read.
    """
    records = read_table(objects, table)
    chunks = [chunk for record in records for chunk in record.chunks]
    # Tensors with equal elements share a range: count it once.
    ranges = {(link.object, link.offset): link.length for chunk in chunks for link in chunk.chain}
    lengths = Counter(len(chunk.chain) for chunk in chunks)
    return StoredSize(
        sum(record.nbytes for record in records),
        sum(ranges.values()),
        len({digest for digest, _ in ranges}),
        len(chunks),
        dict(sorted(lengths.items())),
    )
