"""Computes the lineage of a model version: the versions that it continues, code, environment, and data with shards.

The lineage is read from log entries and shard tables. Data that is not in this repository is no error, but a gap: one
line of text in `gaps`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.provenance.sample_query import split_tables
from datasvc.models.provenance.segments import PlannedVersion, plan_segments
from datasvc.models.registry.ancestry import Version, read_ancestry
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Digest, Repository
from datasvc.repository.logs.references import parse_reference
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.lines.dataset_log import entry_parents
from datasvc.shown import Shown


@dataclass(frozen=True)
class ModelOrigin:
    """Origin of a model version, from its log entry. A field that the entry does not have is empty or None.

    Attributes:
        name: name with version, such as "digits-cnn@3".
        parents: versions that it continues; each is also in the lineage.
        step: number of optimizer steps of its weights; None if unknown.
        code: git revision of the training code and its local changes, see `code_revision`.
        environment: interpreter, packages and GPUs of the run, see `datasvc.models.versions.code_revision`.
        origin: repository, version and commit that it was copied from; {} if it was saved in this repository.
        consumed: segments (ranges of positions) that its own training read, and ancestors only in another repository.
            A mapping per segment and split: `version`, `data`, `table`, `start`, `stop`, `global_batch`, `tail`.
        evaluated: splits that it was evaluated on.
        gaps: unknown parts of its origin, one line each.
        run: run whose log describes its training, NAME/ID; None if unknown.
    """

    name: str
    parents: tuple[str, ...]
    created: str | None
    step: int | None
    message: str
    code: Mapping[str, Any]
    environment: Mapping[str, Any]
    origin: Mapping[str, Any]
    consumed: tuple[Mapping[str, Any], ...]
    evaluated: tuple[str, ...]
    gaps: tuple[str, ...]
    run: str | None = None


@dataclass(frozen=True)
class DataOrigin:
    """Origin of a data-set version, from its log entry.

    Attributes:
        name: name with version, such as "digits@2".
        parents: versions that it was derived from.
        source: what was ingested: `kind`, `url`, `options`.
        change: how it was derived from its parents; {} if it was ingested.
        splits: `table`, `samples`, `shards` and `bytes` of each split, by name.
    """

    name: str
    parents: tuple[str, ...]
    created: str | None
    message: str
    source: Mapping[str, Any]
    change: Mapping[str, Any]
    splits: Mapping[str, Mapping[str, Any]]


@dataclass
class Lineage(Shown):
    """Lineage of a model version.

    Attributes:
        version: name of the version, such as "digits-cnn@3".
        models: the version and all its ancestors, by name, newest first.
        datasets: all data-set versions that these models read, and the ancestors of these data sets, by name.
        shards: digests of the shards of each split that was read, in order, by the digest of its shard table.
        gaps: data that is not in this repository, one line each.
    """

    version: str
    models: dict[str, ModelOrigin] = field(default_factory=dict)
    datasets: dict[str, DataOrigin] = field(default_factory=dict)
    shards: dict[Digest, list[Digest]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the lineage as JSON values.

        Versions are a flat list, because a nested history may exceed the depth limit of JSON parsers.
        """
        return {
            "version": self.version,
            "models": [vars(origin) for origin in self.models.values()],
            "datasets": [vars(origin) for origin in self.datasets.values()],
            "shards": self.shards,
            "gaps": self.gaps,
        }


def read_lineage(repository: Repository, ref: str) -> Lineage:
    """Return the lineage of a model version.

    Raises:
        ConfigError: `ref` is not a valid reference.
        NotFoundError: there is no such version.
        CorruptDataError, UnavailableError: an entry or a shard table cannot be read.
    """
    resolved = repository.resolve("models", ref, removed=True)
    name, entries = str(resolved), EntryReader(repository)
    entries.entry(resolved.name, resolved.version)  # raises here, because below an unreadable entry is only a gap
    ancestry = read_ancestry(repository, [name], entries=entries)
    planned = plan_segments(ancestry)
    lineage = Lineage(name)
    # `versions` has parents first; reverse it.
    for version in reversed(ancestry.versions.values()):
        lineage.models[version.name] = _describe(version, planned[version.name])
    for model in lineage.models.values():
        for segment in model.consumed:
            _add_data(repository, lineage, str(segment["data"]), segment["table"])
    return lineage


def _describe(version: Version, planned: PlannedVersion) -> ModelOrigin:
    """Return the origin of a model version, from its entry and the segments that it consumed."""
    entry = version.entry
    # One mapping per segment and split: a segment of a mixture has several splits.
    consumed = tuple(
        {
            "version": item.version,
            "data": name,
            "table": table,
            "start": list(item.segment.own_start),
            "stop": list(item.segment.span.stop),
            "global_batch": item.segment.span.global_batch,
            "tail": item.segment.span.tail,
        }
        for item in planned.consumed
        for name, table in zip(item.segment.order.names, item.segment.order.tables, strict=True)
    )
    evaluated = tuple(f"{use.dataset}/{use.split}" for use in version.uses if use.purpose == "evaluation")
    return ModelOrigin(
        version.name,
        version.parents,
        entry.get("created"),
        version.step,
        str(entry.get("message") or ""),
        _mapping_or_empty(entry.get("code")),
        _mapping_or_empty(entry.get("environment")),
        _mapping_or_empty(entry.get("origin")),
        consumed,
        evaluated,
        planned.gaps,
        entry.get("run"),
    )


def _add_data(repository: Repository, lineage: Lineage, split: str, table: Digest) -> None:
    """Add the shards of a split that was read, its data-set version, and the ancestors of that version."""
    version, _, name = split.rpartition("/")
    if table not in lineage.shards:
        try:
            shards = ShardTable.read(repository.objects, table).shards()
        except NotFoundError:
            lineage.gaps.append(f"shard table {table} of {split} is not in this repository")
            lineage.shards[table] = []  # so that the gap is added only once
        else:
            lineage.shards[table] = [shard.digest for shard in shards]
    if _add_dataset(repository, lineage, version):
        current = lineage.datasets[version].splits.get(name, {})
        # If the model version was copied from another repository, data of the same name may be different there.
        if current.get("table") != table:
            _add_gap(
                lineage,
                f"{version} in this repository is not the data that was read: split {name!r} has another shard table",
            )


def _add_dataset(repository: Repository, lineage: Lineage, root: str) -> bool:
    """Add a data-set version and its ancestors; return whether that version is in this repository."""
    pending = [root]  # not recursion, because a history may be longer than Python's recursion limit
    while pending:
        name = pending.pop()
        if name in lineage.datasets:
            continue
        try:
            origin = _read_dataset(repository, name)
        except (NotFoundError, ConfigError) as error:
            _add_gap(lineage, f"data-set version {name} is not in this repository: {error}")
            continue
        lineage.datasets[name] = origin
        pending += origin.parents
    return root in lineage.datasets


def _read_dataset(repository: Repository, name: str) -> DataOrigin:
    """Return the origin of the data-set version `name`. Raises ConfigError and the errors of `Log.read`."""
    reference = parse_reference(name)
    if reference.version is None:
        # It is not recorded which version the name or the tag resolved to when the data was read.
        raise ConfigError("a data set without a version number is ambiguous")
    entry = repository.versions("datasets", reference.name).read(reference.version).content
    split_tables(entry, name)  # raises CorruptDataError if the splits are not valid
    return DataOrigin(
        name,
        entry_parents(entry),
        entry.get("created"),
        str(entry.get("message") or ""),
        _mapping_or_empty(entry.get("source")),
        _mapping_or_empty(entry.get("change")),
        entry["splits"],
    )


def _mapping_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _add_gap(lineage: Lineage, gap: str) -> None:
    if gap not in lineage.gaps:
        lineage.gaps.append(gap)


def collapse_chains(lineage: Lineage) -> tuple[Lineage, dict[str, list[str]]]:
    """Return a lineage with one version for each chain, and the versions of each chain, newest first.

    In a chain, each version continues the next one alone, and nothing else continues that one. Both are of the same
    run and read the same data, or one of them read nothing. A run that saves a thousand times is a chain. The version
    whose lineage it is stays alone.

    The version for a chain has the name of its newest version, the parents of its oldest one, and for each split the
    range from the first to the last position that the chain consumed.
    """
    num_children = Counter(parent for model in lineage.models.values() for parent in model.parents)
    chains: dict[str, list[ModelOrigin]] = {}
    chain_of: dict[str, str] = {}
    for name, model in lineage.models.items():
        if name in chain_of:
            continue
        chain = [model]
        while name != lineage.version and (older := _next(lineage, chain[-1], num_children)) is not None:
            if older.name in chain_of or older in chain:
                break
            chain.append(older)
        chains[name] = chain
        chain_of |= dict.fromkeys((member.name for member in chain), name)
    models = {name: _merged(chain, chain_of) for name, chain in chains.items()}
    return replace(lineage, models=models), {name: [each.name for each in chain] for name, chain in chains.items()}


def _next(lineage: Lineage, model: ModelOrigin, num_children: Mapping[str, int]) -> ModelOrigin | None:
    """Return the version that follows `model` in its chain; None if the chain ends."""
    if len(model.parents) != 1:
        return None
    older = lineage.models[model.parents[0]]
    is_same_model = older.name.partition("@")[0] == model.name.partition("@")[0]
    data, older_data = _tables(model), _tables(older)
    is_same_data = not data or not older_data or data == older_data
    is_alike = (older.evaluated, older.run) == (model.evaluated, model.run) and not older.gaps
    return older if is_same_model and is_same_data and is_alike and num_children[older.name] == 1 else None


def _tables(model: ModelOrigin) -> set[tuple[Any, Any]]:
    return {(segment["data"], segment["table"]) for segment in model.consumed}


def _merged(chain: Sequence[ModelOrigin], chain_of: Mapping[str, str]) -> ModelOrigin:
    consumed: dict[tuple[Any, Any], dict[str, Any]] = {}
    for model in chain:
        for segment in model.consumed:
            whole = consumed.setdefault((segment["data"], segment["table"]), dict(segment))
            whole["start"] = min(whole["start"], segment["start"])
            whole["stop"] = max(whole["stop"], segment["stop"])
    parents = tuple(dict.fromkeys(chain_of.get(parent, parent) for parent in chain[-1].parents))
    return replace(chain[0], parents=parents, consumed=tuple(consumed.values()))
