"""Summaries of data-set versions from their log entries and shard tables; no samples are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.logs.redactions import redaction_log
from datasvc.repository.logs.references import split_selection
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.versions.dataset import DatasetVersion, Split, open_dataset, read_version, readable_versions
from datasvc.shards.versions.deletions import count_purged
from datasvc.sizes import format_size
from datasvc.threads import map_in_threads

CLASS_SPREAD: Final = "class_spread"  # field of the entry of an ingest, see `labels.class_spread`
COMPRESSION: Final = "compression"  # field of the entry of an ingest, see `IngestReport`
MAX_SPREAD: Final = 0.3  # up to which shards count as alike
_READS_AT_ONCE: Final = 8


def describe_log(repository: Repository, name: str, *, last: int | None = None) -> list[dict[str, Any]]:
    """Return the entries of the `last` newest versions of a data set (None: all) as JSON values, oldest first.

    Removed versions have `removed`, and versions that lack purged samples their number, `purged`. For what is left
    out, and for errors, see `readable_versions`.
    """
    log = readable_versions(repository, name, last=last)
    removed = repository.state("datasets", log.name).removed
    purged = purged_by_version(repository, log.name, [entry.number for entry in log if entry.number not in removed])
    return [
        {**entry.content, "version": entry.number}
        | ({"removed": True} if entry.number in removed else {})
        | ({"purged": purged[entry.number]} if entry.number in purged else {})
        for entry in log
    ]


def purged_by_version(repository: Repository, name: str, numbers: Iterable[int]) -> dict[int, int]:
    """Return the number of live samples that each version lacks because they were purged; without those of 0.

    Tables are read only if there was a purge in the repository. For errors, see `Split.table`.
    """
    if not redaction_log(repository.objects).read().by_shard:
        return {}
    found = {}
    for number in numbers:
        splits = read_version(repository, Resolved("datasets", name, number)).values()
        found[number] = sum(count_purged(repository.objects, split.table) for split in splits)
    return {number: count for number, count in found.items() if count}


def describe_dataset(dataset: DatasetVersion) -> dict[str, Any]:
    """Return the log entry of a version as JSON values, with statistics of its splits.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a shard table cannot be read.
    """
    # Threads hide the latency of a network; a local disk has none.
    num_threads = 1 if dataset.repository.storage.is_local else _READS_AT_ONCE
    splits = dict(zip(dataset, map_in_threads(describe_split, dataset.values(), num_threads), strict=True))
    return {**dataset.entry.content, "version": str(dataset.resolved), "splits": splits}


def describe_version(repository: Repository, ref: str) -> dict[str, Any]:
    """Return the description of the version that `ref` refers to, even if it is removed; see `describe_dataset`.

    Of a part of its samples, such as "pets@3[label = 3]", describe the views. For a removed version, return only its
    log entry and the fields `removed` and `removal`: the entry of the removal.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`.
        CorruptDataError: the log entry of the version is corrupt; or see `describe_dataset`.
    """
    if split_selection(ref)[1] is not None:
        return describe_dataset(open_dataset(repository, ref))
    resolved, state = repository.resolve_with_state("datasets", ref, removed=True)
    if resolved.version not in state.removed:
        tags = [tag for tag, version in state.tags.items() if version == resolved.version]
        heads = [branch for branch, version in state.branches.items() if version == resolved.version]
        return {
            "tags": tags,
            **({"head_of": heads} if heads else {}),
            **describe_dataset(read_version(repository, resolved)),
        }
    entry = repository.entry(resolved)
    removal = repository.removals("datasets", resolved.name).find(resolved.version)
    facts = {**entry.content, "version": str(resolved), "removed": True}
    return facts | ({"removal": dict(removal.content)} if removal else {})


def read_bad_samples(repository: Repository, ref: str) -> list[dict[str, str]]:
    """Return the bad samples that the ingest of a version left out: `split`, `key` and `reason` of each.

    The list is that of the ingest or append that made this version; [] for a version made from other versions.

    Raises CorruptDataError: the log entry or the list is corrupt. For other errors, see `Repository.resolve`.
    """
    resolved = repository.resolve("datasets", ref, removed=True)
    digest = repository.entry(resolved).content.get("quarantine")
    if digest is None:
        return []
    content = repository.objects.read(parse_digest(str(digest)))
    try:
        samples = [json.loads(line) for line in content.splitlines()]
        return [{name: str(sample[name]) for name in ("split", "key", "reason")} for sample in samples]
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptDataError(f"the list of bad samples of {resolved} is not valid: {error!r}") from error


def describe_split(split: Split) -> dict[str, Any]:
    """Return statistics, columns and class histogram of a split as JSON values. For errors see `Split.table`."""
    table = split.table
    num_stored = int(table.stored_per_shard.sum())
    num_purged = count_purged(split.repository.objects, table)
    return {
        "samples": len(split),
        "deleted" if table.view is None else "left_out": num_stored - len(split),
        **({"purged": num_purged} if num_purged else {}),  # these are counted in `samples`, but have empty values
        "shards": table.num_shards,
        "bytes": table.size_bytes,
        "bytes_per_sample": round(table.size_bytes / num_stored) if num_stored else 0,
        "max_sample_bytes": table.largest("max_sample_bytes"),
        "max_width": table.largest("max_width"),
        "max_height": table.largest("max_height"),
        "image_kinds": dict(table.image_kinds),
        "classes": list(table.classes),
        "class_counts": count_classes(table.label_counts, table.classes),
        "columns": {field.name: str(field.type) for field in table.sample_schema},
        "table": split.digest,
        **({"view": split.view} if split.view else {}),
    }


def count_classes(label_counts: Mapping[int, int], classes: tuple[str, ...]) -> dict[str, int]:
    """Return the number of samples by class name, in label order; {} if the table has no label counts.

    A class without samples counts 0. A label without a class name is listed by its number.
    """
    if not label_counts:
        return {}
    counts = {name: label_counts.get(label, 0) for label, name in enumerate(classes)}
    for label, count in sorted(label_counts.items()):
        if not 0 <= label < len(classes):
            # A class may be named "7": then the samples with the unnamed label 7 are counted as "label 7".
            counts[f"label {label}" if str(label) in classes else str(label)] = count
    return counts


@dataclass(frozen=True)
class VersionBytes:
    """Bytes of the shards of a version.

    Attributes:
        version: number of the version.
        total_bytes: of all its shards.
        new_bytes: of shards that none of the compared versions before it has.
        unique_bytes: of shards that no other compared version has: what its removal would free, if no other data set
            has them.
    """

    version: int
    total_bytes: int
    new_bytes: int
    unique_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def shared_bytes(repository: Repository, name: str, *, last: int | None = None) -> list[VersionBytes]:
    """Compare the shards of the `last` newest versions of a data set (None: all) that are not removed, oldest first.

    Only shard tables are read. A version whose entry cannot be read is left out, see `readable_versions`.

    Raises:
        ConfigError: `last` is not positive.
        NotFoundError, CorruptDataError, UnavailableError: an entry or a shard table cannot be read.
    """
    if last is not None and last < 1:
        raise ConfigError(f"last is {last}; expected 1 or more")
    log = readable_versions(repository, name, last=last)
    removed = repository.state("datasets", log.name).removed
    numbers = [entry.number for entry in log if entry.number not in removed]

    def read(number: int) -> dict[Digest, int]:
        """Return the size of each shard of a version."""
        splits = read_version(repository, Resolved("datasets", log.name, number)).values()
        return {shard.digest: shard.size_bytes for split in splits for shard in split.table.shards()}

    sizes = map_in_threads(read, numbers, _READS_AT_ONCE)
    num_versions = Counter(digest for shards in sizes for digest in shards)
    seen: set[Digest] = set()
    result = []
    for number, shards in zip(numbers, sizes, strict=True):
        result.append(
            VersionBytes(
                number,
                total_bytes=sum(shards.values()),
                new_bytes=sum(size for digest, size in shards.items() if digest not in seen),
                unique_bytes=sum(size for digest, size in shards.items() if num_versions[digest] == 1),
            )
        )
        seen |= shards.keys()
    return result


def describe_spread(spread: float) -> str:
    """Return in words what `class_spread` found, and what to do."""
    if spread <= MAX_SPREAD:
        return f"shards are alike (Cramér's V {spread:.2f})"
    return (
        f"shards differ in their classes (Cramér's V {spread:.2f}; 0: alike, 1: each class in shards of its own). "
        "Keep the loader's shuffle='global', because batches of a windowed shuffle would have few classes; or ingest "
        "without keep_order, which mixes the samples"
    )


def describe_compression(compression: Mapping[str, Any]) -> str:
    """Return in words how the shards of an ingest were compressed; `compression` is the field of a split."""
    size_bytes, before_bytes = compression["bytes"], compression["bytes"] + compression["saved_bytes"]
    return (
        f"compressed by {compression['codec']}: {before_bytes / max(1, size_bytes):.2f} times smaller "
        f"({format_size(before_bytes)} -> {format_size(size_bytes)})"
    )
