"""Dry run of an ingest: predict its result from the source's listing and the first 32 MiB of its samples.

`datasvc ingest --dry-run` uses it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack

import pyarrow as pa

from datasvc.errors import BadSampleError
from datasvc.repository import Repository
from datasvc.repository.logs.references import parse_line
from datasvc.shards.format.digests import digest_blob
from datasvc.shards.format.schema import stored_schema
from datasvc.shards.images.header import Reencoding
from datasvc.shards.ingestion.build import IngestWork
from datasvc.shards.ingestion.build_streamed import check_batch
from datasvc.shards.ingestion.ingest import AnySource, count_workers, find_newest, open_any_source
from datasvc.shards.ingestion.ingest_commit import changed_options, choose_build_options
from datasvc.shards.ingestion.media_check import check_media
from datasvc.shards.ingestion.options import IngestOptions, IngestSettings, show_ingest_options
from datasvc.shards.ingestion.plan import BuildOptions, IngestUnit, plan_units
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, ListedSource, Source, StreamedSource

_READ_BYTES: Final = 32 << 20  # bytes of samples to read


@dataclass(frozen=True)
class DryRun:
    """The predicted result of an ingest.

    Attributes:
        kind: format of the source.
        num_samples: number of samples by split; None if the source does not give it and no part was read to its end.
        is_estimate: whether numbers of samples are extrapolated from the parts that were read.
        size_bytes: bytes of the source.
        num_shards: number of shards of all splits.
        has_estimated_shards: whether `num_shards` is estimated from sizes; if not, it is exact.
        schema: columns of the shards.
        classes: class names by label.
        seconds: estimated duration without writing, from the time of reading and checking the first samples.
        bad: bad samples among those that were read.
        ignored: number of files of the source that would not be ingested, by extension.
        changed_options: see `IngestReport`.
    """

    kind: str
    num_samples: dict[str, int | None]
    is_estimate: bool
    size_bytes: int
    num_shards: int
    has_estimated_shards: bool
    schema: pa.Schema
    classes: tuple[str, ...]
    seconds: float
    bad: list[BadSample]
    ignored: dict[str, int]
    changed_options: Mapping[str, tuple[Any, Any]]


@dataclass
class _SourceProbe:
    """Measurements of the samples that were read; stored bytes are those after decompression.

    The fields `complete_*` count only parts of a streamed source that were read to their end.
    """

    stored_bytes: int = 0
    complete_source_bytes: int = 0
    complete_stored_bytes: int = 0
    complete_samples: int = 0


@show_ingest_options
def dry_run_ingest(
    repository: Repository | None, source: AnySource, name: str, **options: Unpack[IngestOptions]
) -> DryRun:
    """Return the predicted result of `ingest` with the same arguments; nothing is created.

    The first samples are read and checked as by `ingest`, but listed images are not encoded again. Without `append`,
    the repository is not read and may be None. Raise what `ingest` raises.

    Args:
        repository: the repository that `ingest` would store it in.
        source: see `ingest`.
        name: see `ingest`.
        options: see `IngestSettings`.
    """
    settings = IngestSettings(**options)
    opened, limit = open_any_source(source, settings.source_options), settings.limit
    line = parse_line(name)
    newest = find_newest(repository, line) if settings.append and repository is not None else None
    _, build_options = choose_build_options(repository, newest, opened, settings)
    num_workers = count_workers(opened, settings.workers)
    units = plan_units(opened, build_options)
    bad: list[BadSample] = []
    started = time.perf_counter()
    is_listed = isinstance(opened, ListedSource)
    probe = _read_files(opened, build_options, bad) if is_listed else _read_parts(opened, build_options, bad)
    probe_s = time.perf_counter() - started
    size_bytes = sum(unit.size_bytes for unit in units)
    num_samples = _count_samples(units, probe)
    # An ingest stops after `limit` samples of a streamed source. For a listed source, `units` has no more files.
    needed_bytes = size_bytes * _needed_share(num_samples, limit)
    # Stored bytes per source byte, above 1 for a compressed source; 1 if no part was read to its end.
    expansion = probe.complete_stored_bytes / probe.complete_source_bytes if probe.complete_source_bytes else 1.0
    return DryRun(
        kind=opened.kind,
        num_samples={
            split: count if count is None or limit is None else min(count, limit)
            for split, count in num_samples.items()
        },
        is_estimate=not is_listed and any(part.num_samples is None for unit in units for part in unit.parts),
        size_bytes=size_bytes,
        # Each unit of a listed source is one shard.
        num_shards=len(units) if is_listed else max(1, round(needed_bytes * expansion / settings.shard_bytes)),
        has_estimated_shards=not is_listed,
        schema=stored_schema(opened.schema),
        classes=opened.classes,
        seconds=_estimate_seconds(probe, probe_s, needed_bytes, expansion) / max(1, min(num_workers, len(units))),
        bad=bad,
        ignored=dict(opened.ignored),
        changed_options=changed_options(
            repository,
            newest,
            {**build_options.to_dict(), **dataclasses.asdict(settings.source_options or SourceOptions())},
        ),
    )


def _estimate_seconds(probe: _SourceProbe, probe_s: float, needed_bytes: float, expansion: float) -> float:
    """Return the seconds in which one process reads and checks `needed_bytes` of the source.

    `expansion`, stored bytes per source byte, converts them to stored bytes, which `probe.stored_bytes` counts.
    """
    if probe.stored_bytes:
        return probe_s * needed_bytes * expansion / probe.stored_bytes
    # All samples that were read are bad, so only the source bytes of complete parts are known.
    return probe_s * needed_bytes / probe.complete_source_bytes if probe.complete_source_bytes else 0.0


def _needed_share(num_samples: Mapping[str, int | None], limit: int | None) -> float:
    """Return the share of the samples that an ingest with `limit` reads; 1 if a number of samples is unknown."""
    counts = [count for count in num_samples.values() if count is not None]
    if limit is None or len(counts) < len(num_samples) or not sum(counts):
        return 1.0
    return sum(min(count, limit) for count in counts) / sum(counts)


def _count_samples(units: Sequence[IngestUnit], probe: _SourceProbe) -> dict[str, int | None]:
    """Return the number of samples by split. In a streamed source, held-out samples still count as "train"."""
    counts: dict[str, int | None] = {}
    for unit in units:
        part_counts = [part.num_samples for part in unit.parts]
        if None not in part_counts:
            count = len(unit.files) + sum(part_count for part_count in part_counts if part_count is not None)
        elif probe.complete_source_bytes:
            count = round(unit.size_bytes * probe.complete_samples / probe.complete_source_bytes)
        else:
            counts[unit.split] = None  # the source does not give it, and no part was read to its end
            continue
        previous_count = counts.get(unit.split, 0)
        # One unit with an unknown number makes the number of the split unknown.
        counts[unit.split] = None if previous_count is None else previous_count + count
    return counts


def _read_files(source: Source, options: BuildOptions, bad: list[BadSample]) -> _SourceProbe:
    """Read and check the first files of a listed source; add bad samples to `bad`."""
    assert isinstance(source, ListedSource)
    probe = _SourceProbe()
    reader = FileReader(source.url)
    for split, files in source.splits.items():
        for file in files:
            content = reader.read(file.path)
            probe.stored_bytes += len(content)
            digest_blob(content)  # only so that its time counts in the measured rate
            try:
                check_media(source.media, content, Reencoding(), decode=options.decode_check)
            except BadSampleError as error:
                bad.append(BadSample(split, file.key, str(error)))
            if probe.stored_bytes >= _READ_BYTES:
                return probe
    return probe


def _read_parts(source: Source, options: BuildOptions, bad: list[BadSample]) -> _SourceProbe:
    """Read and check the first samples of a streamed source; add bad samples to `bad`."""
    assert isinstance(source, StreamedSource)
    probe = _SourceProbe()
    # Nothing is stored, so the fields that identify the repository and the journal are empty.
    work = IngestWork("", "", "", "", source, stored_schema(source.schema), options, source.classes)
    for part in source.parts:
        part_samples = part_bytes = 0
        for batch in source.read_prefixed(part):
            if isinstance(batch, BadSample):
                bad.append(batch)
                continue
            checked = check_batch(work, batch, part.split, bad)
            _ = checked.digests  # only so that its time counts in the measured rate
            part_samples += checked.num_samples
            part_bytes += int(checked.sizes_bytes.sum())
            if probe.stored_bytes + part_bytes >= _READ_BYTES:
                probe.stored_bytes += part_bytes
                return probe
        probe.stored_bytes += part_bytes
        probe.complete_samples += part_samples
        probe.complete_stored_bytes += part_bytes
        probe.complete_source_bytes += part.size_bytes
    return probe
