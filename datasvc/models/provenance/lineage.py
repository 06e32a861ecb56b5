"""Where a version came from, down to shards and sources: versions it continues, code, environment, data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.provenance.segments import Own, plan_segments
from datasvc.models.registry.ancestry import Version, read_ancestry
from datasvc.repository import Digest, Repository
from datasvc.repository.logs.references import parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.shard_table import ShardTable


@dataclass(frozen=True)
class ModelOrigin:
    """What a model version is made of.

    Attributes:
        name: "digits-cnn@3".
        parents: versions that it continues, all of them in the lineage.
        created: as its entry says.
        step: optimizer steps behind it; None: not known.
        message: of whoever saved it.
        code: as in the entry; {} where it says nothing.
        environment: likewise.
        origin: the repository, version and commit that it was copied from; {} where it was saved here.
        consumed: what its own training read, segment by segment: `version`, `data`, `table`, `start`, `stop`,
            `global_batch`, `tail`.
        evaluated: data that it was evaluated on.
        gaps: what is not known of it, a line each.
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


@dataclass(frozen=True)
class DataOrigin:
    """What a data-set version is made of.

    Attributes:
        name: "digits@2".
        parents: versions that it was made from.
        created: as its entry says.
        message: of whoever made it.
        source: what was ingested: `kind`, `url`, `options`.
        change: what was done to its parents; {} where it was ingested anew.
        splits: by name `table`, `samples`, `shards`, `bytes`.
    """

    name: str
    parents: tuple[str, ...]
    created: str | None
    message: str
    source: Mapping[str, Any]
    change: Mapping[str, Any]
    splits: Mapping[str, Mapping[str, Any]]


@dataclass
class Lineage:
    """Where a version came from.

    Attributes:
        version: its name.
        models: it and all that it continues, by name, newest first.
        datasets: all data-set versions that these read, and those that these were made from, by name.
        shards: by shard table that was read, the digests of its shards in order.
        gaps: data that is not in this repository, a line each.
    """

    version: str
    models: dict[str, ModelOrigin] = field(default_factory=dict)
    datasets: dict[str, DataOrigin] = field(default_factory=dict)
    shards: dict[Digest, list[Digest]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the lineage as JSON values; flat, so that a chain of a thousand versions is not nested so deep."""
        return {
            "version": self.version,
            "models": [vars(each) for each in self.models.values()],
            "datasets": [vars(each) for each in self.datasets.values()],
            "shards": self.shards,
            "gaps": self.gaps,
        }


def read_lineage(repository: Repository, ref: str) -> Lineage:
    """Return where a model version came from.

    Raises:
        ConfigError, NotFoundError: `ref` names no version.
        CorruptDataError, UnavailableError: an entry or a shard table cannot be read.
    """
    name = str(repository.resolve("models", ref, removed=True))
    ancestry = read_ancestry(repository, [name])
    planned = plan_segments(ancestry)
    found = Lineage(name)
    for version in reversed(ancestry.versions.values()):
        found.models[version.name] = _describe(version, planned[version.name])
    for model in found.models.values():
        for each in model.consumed:
            _add_data(repository, found, str(each["data"]), each["table"])
    return found


def _describe(version: Version, own: Own) -> ModelOrigin:
    consumed = tuple(
        {
            "version": each.version,
            "data": name,
            "table": table,
            "start": list(each.segment.since),
            "stop": list(each.segment.span.stop),
            "global_batch": each.segment.span.global_batch,
            "tail": each.segment.span.tail,
        }
        for each in own.consumed
        for name, table in zip(each.segment.order.names, each.segment.order.tables, strict=True)
    )
    evaluated = tuple(f"{use.dataset}/{use.split}" for use in version.uses if use.purpose == "evaluation")
    return ModelOrigin(
        version.name,
        version.parents,
        version.entry.get("created"),
        version.step,
        str(version.entry.get("message") or ""),
        _mapping(version.entry.get("code")),
        _mapping(version.entry.get("environment")),
        _mapping(version.entry.get("origin")),
        consumed,
        evaluated,
        own.gaps,
    )


def _add_data(repository: Repository, found: Lineage, split: str, table: Digest) -> None:
    """Add the data-set version of a split that was read, what that was made from, and the shards of the split."""
    version, _, name = split.rpartition("/")
    if table not in found.shards:
        try:
            raw = repository.objects.read(table)
        except NotFoundError:
            found.gaps.append(f"shard table {table} of {split} is not in this repository")
            found.shards[table] = []
        else:
            shards = ShardTable.decode(raw, repository.objects.location(table)).shards()
            found.shards[table] = [shard.digest for shard in shards]
    if _add_dataset(repository, found, version):
        own = found.datasets[version].splits.get(name, {})
        if own.get("table") != table:
            _say(found, f"{version} in this repository is not the data that was read: its {name!r} has another table")


def _add_dataset(repository: Repository, found: Lineage, root: str) -> bool:
    line = [root]
    while line:
        name = line.pop()
        if name in found.datasets:
            continue
        try:
            origin = _read_dataset(repository, name)
        except (NotFoundError, ConfigError) as error:
            _say(found, f"data-set version {name} is not known here: {error}")
            continue
        found.datasets[name] = origin
        line += origin.parents
    return root in found.datasets


def _read_dataset(repository: Repository, name: str) -> DataOrigin:
    wanted = parse_reference(name)
    if wanted.version is None:
        raise ConfigError("a name or tag may have meant any version when it was read")
    entry = repository.versions("datasets", wanted.name).read(wanted.version).content
    change = _mapping(entry.get("change"))
    merged = change.get("versions", ()) if change.get("kind") == "merge" else ()
    parents = [*([entry["parent"]] if entry.get("parent") else []), *merged]
    try:
        for split in entry["splits"].values():
            parse_digest(split["table"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry of {name} does not say what its splits are: {error!r}") from error
    return DataOrigin(
        name,
        tuple(dict.fromkeys(map(str, parents))),
        entry.get("created"),
        str(entry.get("message") or ""),
        _mapping(entry.get("source")),
        change,
        entry["splits"],
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _say(found: Lineage, line: str) -> None:
    if line not in found.gaps:
        found.gaps.append(line)
