"""Ingest a source as the next version of a data set.

`plan` divides the source into units, and decides which shard contains each sample, from the source's listing and the
options only. Worker processes build the shards of the units (`executors`). All objects are stored before the single
commit (`ingest_commit`), so that a failure leaves no visible change. A journal records finished shards, so the
same command continues an interrupted ingest.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Unpack

from datasvc.errors import ConfigError, SourceChangedError, UnavailableError
from datasvc.progress import Progress
from datasvc.repository import Entry, ObjectInfo, Objects, Repository, Resolved
from datasvc.repository.branching import find_branch
from datasvc.repository.logs.journal import Journal
from datasvc.repository.logs.references import LineName, parse_line
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.urls import split_existing
from datasvc.shards.format.schema import stored_schema, with_compression
from datasvc.shards.format.shard_table import ShardTable, TableRow
from datasvc.shards.images.header import Reencoding
from datasvc.shards.ingestion.build import BuiltShard, IngestWork, UnitResult, describe_compressed
from datasvc.shards.ingestion.duplicates import (
    DuplicateSample,
    SplitDuplicates,
    check_bad,
    check_duplicates,
    drop_duplicates,
    store_quarantine,
)
from datasvc.shards.ingestion.executors import EngineName, lean_arrow, run_units
from datasvc.shards.ingestion.ingest_commit import LEFT_OUT, IngestCommit, changed_options, choose_build_options
from datasvc.shards.ingestion.options import IngestOptions, IngestSettings, show_ingest_options
from datasvc.shards.ingestion.plan import BuildOptions, IngestUnit, plan_units, relabel_unit
from datasvc.shards.ingestion.recipes import check_attachable
from datasvc.shards.sources.choose import check_options, open_source
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, FileSource, ListedSource, Source, printable
from datasvc.shards.sources.python_samples import PythonSource
from datasvc.shards.sources.tar.webdataset import WebDatasetSource
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.describe import CLASS_SPREAD, COMPRESSION
from datasvc.shards.versions.label_conflicts import LabelConflict, find_label_conflicts
from datasvc.shards.versions.labels import class_spread, combine_classes, name_tables, plan_labels
from datasvc.shards.versions.split_overlap import Overlap
from datasvc.shards.versions.version_entry import VAL_FRACTION
from datasvc.threads import count_processors

AnySource = str | os.PathLike[str] | Source | Iterable[Mapping[str, Any]]

# Source options that hold a path or URL.
_PATH_OPTIONS: Final = frozenset({"manifest", "ground_truth", "synsets", "tokenizer", "chat_template"})
# Part of the journal's name. Increase it when planning changes, so that no ingest continues shards of another plan.
PLAN_FORMAT = 1


@dataclass(frozen=True)
class IngestReport:
    """The result of `ingest`.

    Attributes:
        version: the committed version.
        num_samples: number of samples of the version, by split.
        num_shards: number of shards of the version, by split.
        size_bytes: bytes of all shards of the version.
        num_added: number of samples from this source, by split.
        num_left_out: after an append, number of samples of the previous version that this one lacks, by split; only
            splits that lose samples. New samples replace them, or on_split_overlap="drop" removes them.
        bad: samples of the source that are damaged or repeat a key; they are not in the version.
        duplicates: samples with the same content as an earlier one of their split, by split.
        overlaps: samples that two splits share, except those that an earlier version accepted.
        conflicts: samples of the source whose label contradicts that of an equal sample, also those that
            duplicates="drop" left out.
        ignored: number of files of the source that are not ingested, by extension.
        num_resumed: number of shards that an earlier, interrupted run stored.
        has_source_changed: whether the source changed since an interrupted run, which was therefore not continued.
        changed_options: options of an append that differ from those of the version it continues: the value before and
            now, by name.
        class_spread: how much the classes of the new shards differ from shard to shard, by split; see
            `labels.class_spread`.
        compression: of each split with compressed columns, the `codec`, the `bytes` of the new shards and the
            `saved_bytes` by which these are smaller.
    """

    version: Resolved
    num_samples: dict[str, int]
    num_shards: dict[str, int]
    size_bytes: int
    num_added: dict[str, int]
    num_left_out: dict[str, int]
    bad: list[BadSample] = field(default_factory=list)
    duplicates: Mapping[str, Sequence[DuplicateSample]] = field(default_factory=dict)
    overlaps: Sequence[Overlap] = ()
    conflicts: Sequence[LabelConflict] = ()
    ignored: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    has_source_changed: bool = False
    changed_options: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    class_spread: Mapping[str, float] = field(default_factory=dict)
    compression: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        # Without the lists, which may have millions of samples.
        counts = {
            "num_samples": self.num_samples,
            "num_shards": self.num_shards,
            "size_bytes": self.size_bytes,
            "num_added": self.num_added,
        }
        lists = {
            "bad": len(self.bad),
            "duplicates": sum(map(len, self.duplicates.values())),
            "overlaps": sum(len(overlap.samples) for overlap in self.overlaps),
            "conflicts": len(self.conflicts),
            "ignored": self.ignored.total(),
        }
        shown = [f"{name}={value}" for name, value in counts.items()]
        shown += [f"{name}=<{count}>" for name, count in lists.items() if count]
        return f"IngestReport({self.version}, {', '.join(shown)})"


@show_ingest_options
def ingest(repository: Repository, source: AnySource, name: str, **options: Unpack[IngestOptions]) -> IngestReport:
    """Ingest a source as the next version of data set `name`. Existing versions stay unchanged.

    Args:
        repository: the repository to store it in.
        source: path of a folder or file, or an fsspec URL; an opened source; or an iterable of samples, which are
            dicts of Python values by column. An iterable is read once, by this process.
        name: name of the data set, which is created if it does not exist; or NAME@BRANCH to commit to a branch.
        options: see `IngestSettings`.

    Raises:
        ConfigError: an option is out of range; the source mixes layouts; or its columns are inconsistent, or
            incompatible with those of the data set.
        NotFoundError: the source does not exist or has no samples.
        BadSampleError: samples are bad and `on_bad` is "fail", or there are duplicates and `duplicates` is "fail";
            the message has their number and the first ones.
        SourceChangedError: a file changed after it was listed.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`, `combine.append_table`,
            `split_overlap.settle_overlaps`.
    """
    return run_ingest(repository, source, name, IngestSettings(**options))


@lean_arrow()
def run_ingest(
    repository: Repository, source: AnySource, name: str, settings: IngestSettings, *, in_place: bool = False
) -> IngestReport:
    """Ingest a source, or attach it with `in_place`; see `ingest` and `attach`."""
    line = parse_line(name)
    opened = open_any_source(source, settings.source_options)
    # Also without `append`: before anything is read, a branch that does not exist is an error.
    found = find_newest(repository, line) if settings.append or line.branch is not None else None
    newest = found if settings.append else None
    recorded_fraction, build_options = choose_build_options(repository, newest, opened, settings)
    if in_place:
        check_attachable(opened)
        build_options = dataclasses.replace(
            build_options, in_place=True, reencoding=Reencoding(), compress_columns="none"
        )
    if settings.classes is not None and opened.classes:
        raise ConfigError(
            f"{redact_url(opened.url)} has class names of its own, so that --classes cannot rename them; leave out "
            "--classes"
        )
    num_workers = count_workers(opened, settings.workers, settings.engine)
    stored_classes = _choose_classes(repository, newest, opened.classes)
    settings.progress.begin(opened.size_bytes)
    plan = _make_plan(repository, name, opened, build_options, stored_classes)
    with ExitStack() as cleanup:
        results, num_resumed = _build(plan, settings.engine, num_workers, settings.progress, cleanup)
        # A source that the caller opened cannot be listed again, because its options are unknown here.
        if isinstance(source, (str, os.PathLike)) or settings.source_options is not None:
            _check_unchanged(plan.work.fingerprint, opened, settings.source_options)
        rows_by_split = _rows(results)
        compression = describe_compressed(rows_by_split)
        accepted = _accept(repository, opened, results, _tables(plan, rows_by_split, compression), settings)
        counts = {name: [row.statistics.label_counts for row in rows] for name, rows in rows_by_split.items()}
        spreads = {name: spread for name in counts if (spread := class_spread(counts[name])) is not None}
        metadata: dict[str, Any] = {
            "message": settings.message,
            "source": _describe(plan, settings),
            "skipped": len(accepted.bad),
            "quarantine": store_quarantine(repository.objects, accepted.bad),
            "ignored": dict(opened.ignored),
            VAL_FRACTION: recorded_fraction,
            **({CLASS_SPREAD: spreads} if spreads else {}),
            **({COMPRESSION: compression} if compression else {}),
        }
        commit = IngestCommit(
            repository=repository,
            line=line,
            tables=accepted.tables,
            metadata=metadata,
            attempt=plan.work.attempt,
            settings=settings,
            keys_are_places=opened.keys_are_places,
            has_duplicates=bool(accepted.duplicates) and settings.duplicates != "drop",
        )
        committed = commit.run()
        with suppress(UnavailableError):  # the version is committed; `gc` removes a journal that is left behind
            plan.journal.remove()
    return _report(plan, accepted, commit, committed, newest=newest, num_resumed=num_resumed)


def _choose_classes(repository: Repository, newest: Resolved | None, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the classes by stored label, for a source with these classes.

    An append keeps the labels of the `newest` version, because otherwise it would write the existing shards again.
    """
    newest_classes: tuple[str, ...] = ()
    if newest is not None and classes:
        newest_classes = max((split.classes for split in open_dataset(repository, str(newest)).values()), key=len)
    return combine_classes(newest_classes, [classes])


def _report(
    plan: _Plan,
    accepted: _Accepted,
    commit: IngestCommit,
    committed: Entry,
    *,
    newest: Resolved | None,
    num_resumed: int,
) -> IngestReport:
    """Return the report of a committed ingest; `newest` is the version that it continues, `committed` the new one."""
    splits = committed.content["splits"]
    return IngestReport(
        version=Resolved("datasets", commit.line.name, committed.number),
        num_samples={split: description["samples"] for split, description in splits.items()},
        num_shards={split: description["shards"] for split, description in splits.items()},
        size_bytes=sum(description["bytes"] for description in splits.values()),
        num_added=committed.content["added"],
        num_left_out=committed.content.get(LEFT_OUT, {}),
        bad=accepted.bad,
        duplicates=accepted.duplicates,
        overlaps=commit.overlaps,
        conflicts=list(dict.fromkeys([*commit.conflicts, *accepted.dropped_conflicts])),
        changed_options=changed_options(plan.repository, newest, commit.metadata["source"]["options"]),
        ignored=Counter(commit.metadata["ignored"]),
        num_resumed=num_resumed,
        has_source_changed=plan.has_source_changed,
        class_spread=commit.metadata.get(CLASS_SPREAD, {}),
        compression=commit.metadata.get(COMPRESSION, {}),
    )


class _Accepted(NamedTuple):
    """What is committed of a source, and what is reported about it; see `IngestReport`."""

    tables: dict[str, ShardTable]
    bad: list[BadSample]
    duplicates: Mapping[str, Sequence[DuplicateSample]]
    dropped_conflicts: list[LabelConflict]


def _accept(
    repository: Repository,
    source: Source,
    results: Sequence[UnitResult],
    tables: dict[str, ShardTable],
    settings: IngestSettings,
) -> _Accepted:
    """Leave out bad samples and duplicates by the rules of the settings, or raise BadSampleError."""
    if settings.classes is not None:
        tables |= name_tables(tables, settings.classes)
    # Search for repeated keys, except in a listed source: its keys are paths, or were checked at the listing.
    found = SplitDuplicates.find(repository.objects, tables, by_key=not isinstance(source, ListedSource))
    bad = [sample for result in results for sample in result.bad]
    check_bad(bad, found.bad, tables, source, fails=settings.on_bad == "fail")
    dropped = [found.by_key]  # with `on_bad` "fail", `check_bad` has raised unless this is empty
    if settings.duplicates == "fail":
        check_duplicates(found.by_payload, source)
    elif settings.duplicates == "drop":
        dropped.append(found.by_payload)
    # A dropped copy may have the right label, and the one that stays the wrong one.
    contradicted = settings.duplicates == "drop" and bool(found.by_payload)
    conflicts = find_label_conflicts(repository.objects, tables) if contradicted else []
    return _Accepted(
        drop_duplicates(repository.objects, tables, dropped), bad + found.bad, found.by_payload, conflicts
    )


def open_any_source(source: AnySource, options: SourceOptions | None = None) -> Source:
    """Return an opened source for any `source` that `ingest` accepts. Raise what `open_source` raises."""
    if isinstance(source, Source):
        return source
    if isinstance(source, (str, os.PathLike)):
        return open_source(os.fspath(source), options)
    if options is not None:
        if options.format is not None:
            raise ConfigError(f"an iterable has no format {options.format!r}; leave out the format")
        check_options(options, PythonSource.kind, "the iterable")
    opened = PythonSource(source, options)
    return opened.with_key_prefix(options.key_prefix) if options and options.key_prefix else opened


@dataclass(frozen=True)
class _Plan:
    """Everything that is decided before samples are read."""

    repository: Repository
    work: IngestWork
    units: Sequence[IngestUnit]
    journal: Journal
    has_source_changed: bool


def _make_plan(
    repository: Repository, name: str, source: Source, options: BuildOptions, classes: tuple[str, ...]
) -> _Plan:
    """Return the plan, and begin its journal or resume it. `classes` has the class names by stored label."""
    new_labels = plan_labels(source.classes, classes)  # empty if the labels of the source are stored unchanged
    labels = tuple(new_labels[label] for label in range(len(new_labels))) if new_labels else None
    schema = stored_schema(source.schema)
    schema = with_compression(schema, compressed=True) if options.compress_columns == "auto" else schema
    # A run continues an earlier run only if these values, the options and the fingerprint are equal. Then both have
    # the same `attempt`.
    identity = [PLAN_FORMAT, name, source.kind, redact_url(source.url), list(classes), str(schema)]
    plan_id = digest_of(json.dumps([identity, options.to_nested_dict()], sort_keys=True).encode())
    fingerprint = source.fingerprint()
    journal = repository.journal(plan_id, fingerprint)
    attempt, has_changed = journal.begin()
    # After the fingerprint, which a new listing by the same URL must have.
    if options.in_place and isinstance(source, FileSource):
        # Recipes are read on other nodes and in other folders.
        source = dataclasses.replace(source, url=_absolute(source.url))
        source = source.cut(options.shard_bytes) if isinstance(source, WebDatasetSource) else source
    units = plan_units(source, options)
    units = [relabel_unit(unit, labels) for unit in units] if labels else units
    # The work is sent to every worker without the listing, because the units contain it.
    bare_source = source.without_files() if isinstance(source, ListedSource) else source
    work = IngestWork(repository.url, plan_id, fingerprint, attempt, bare_source, schema, options, classes, labels)
    # The fingerprint of an iterable is random, so another fingerprint does not mean that the source changed.
    has_changed = has_changed and not isinstance(source, PythonSource)
    return _Plan(repository, work, units, journal, has_changed)


def _check_unchanged(fingerprint: str, source: Source, options: SourceOptions | None) -> None:
    """Raise SourceChangedError if a new listing of the source has another fingerprint than the ingested one."""
    # An iterable cannot be listed again. Each local file of a listed source was checked when it was read.
    if isinstance(source, PythonSource) or (isinstance(source, ListedSource) and FileReader(source.url).is_local):
        return
    if open_source(source.url, options).fingerprint() != fingerprint:
        raise SourceChangedError(
            f"{redact_url(source.url)} changed while it was ingested, nothing was committed; run the same command "
            "again when no process writes to the source any more"
        )


def _build(
    plan: _Plan, engine: EngineName, workers: int, progress: Progress, cleanup: ExitStack
) -> tuple[list[UnitResult], int]:
    """Build the units that the journal lacks; return all results, and the number of shards of an earlier run."""
    done, earlier = _read_journal(plan)
    results = {result.number: result for result in done}
    num_resumed = sum(len(result.shards) for result in done) + sum(map(len, earlier.values()))
    # Units that an interrupted run finished count as progress too.
    for unit in plan.units:
        if unit.number in results:
            shards = results[unit.number].shards
            num_samples = sum(shard.row.statistics.num_samples for shard in shards)
            progress.advance(unit.size_bytes, num_samples=num_samples, num_shards=len(shards))
    remaining = [unit for unit in plan.units if unit.number not in results]
    built = run_units(
        plan.work,
        remaining,
        plan.repository,
        earlier,
        engine=engine,
        workers=workers,
        progress=progress,
        cleanup=cleanup,
    )
    results |= {result.number: result for result in built}
    return [results[unit.number] for unit in plan.units], num_resumed


def _read_journal(plan: _Plan) -> tuple[list[UnitResult], dict[int, dict[tuple[str, int], BuiltShard]]]:
    """Return finished units; and stored shards of unfinished units, by unit number, then by split and ordinal."""
    done: list[UnitResult] = []
    earlier: dict[int, dict[tuple[str, int], BuiltShard]] = {}
    for name, content in sorted(plan.journal.read_all().items()):
        if "unit" in content:
            result = UnitResult.from_dict(content)
            if all(_is_stored(plan.repository.objects, shard) for shard in result.shards):
                done.append(result)
        else:
            shard = BuiltShard.from_dict(content)
            if _is_stored(plan.repository.objects, shard):
                unit = int(name[:8])  # see `ShardFinisher`: the name starts with the number of the unit
                earlier.setdefault(unit, {})[shard.split, shard.ordinal] = shard
    # The journal keeps the records of single shards after their unit is finished, but the unit's record is enough.
    for result in done:
        earlier.pop(result.number, None)
    return done, earlier


def _is_stored(objects: Objects, shard: BuiltShard) -> bool:
    """Return whether the repository still has a shard and its sample index; protect both from a concurrent `gc`."""
    sample_index = shard.row.index
    assert sample_index is not None
    index_bytes = objects.size(sample_index)
    return (
        index_bytes is not None
        and objects.refresh(ObjectInfo(sample_index, index_bytes))
        and (objects.refresh(shard.row.shard) or objects.size(shard.row.shard.digest) == shard.row.shard.size_bytes)
    )


def _tables(
    plan: _Plan, rows_by_split: Mapping[str, Sequence[TableRow]], compressed: Collection[str]
) -> dict[str, ShardTable]:
    """Return the shard table of each split that has samples; splits of `compressed` have compressed columns."""
    schema = plan.work.schema
    return {
        split: ShardTable.build(rows, with_compression(schema, compressed=split in compressed), plan.work.classes)
        for split, rows in rows_by_split.items()
    }


def _rows(results: Sequence[UnitResult]) -> dict[str, list[TableRow]]:
    """Return the rows of the shard table of each split, in the order of the plan."""
    rows: dict[str, list[TableRow]] = {}
    for result in results:
        for shard in result.shards:
            rows.setdefault(shard.split, []).append(shard.row)
    return rows


def find_newest(repository: Repository, line: LineName) -> Resolved | None:
    """Return the newest version of a line; None if the main line has none.

    Raises:
        NotFoundError: there is no such branch.
        CorruptDataError, UnavailableError: see `Repository.resolve`.
    """
    if line.branch is None:
        return repository.newest("datasets", line.name)
    find_branch(repository, line.name, line.branch)
    return repository.resolve("datasets", str(line))


def count_workers(source: Source, workers: int | None, engine: EngineName = "local") -> int:
    """Return the number of processes that build the shards of `source`; None stands for one per core.

    Raises:
        ConfigError: `workers` is less than 1; or `source` is an iterable, which only this process can read, and the
            engine is a cluster.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}; expected at least 1")
    if isinstance(source, PythonSource):
        if engine != "local":
            raise ConfigError(
                "an iterable can only be read by this process: leave out engine='ray', or write it to files"
            )
        return 1
    return count_processors() if workers is None else workers


def _describe(plan: _Plan, settings: IngestSettings) -> dict[str, Any]:
    """Return the description of the source for the log entry, without credentials."""
    # Defaults are left out, so that the entry shows what the user chose.
    source_options = {
        name: printable(redact_url(_absolute(value) if name in _PATH_OPTIONS else value))
        if isinstance(value, str)
        else value
        for name, value in dataclasses.asdict(settings.source_options or SourceOptions()).items()
        if value != getattr(SourceOptions(), name)
    }
    source = plan.work.source
    return {
        "kind": source.kind,
        "url": printable(redact_url(source.url if isinstance(source, PythonSource) else _absolute(source.url))),
        "options": {
            **plan.work.options.to_dict(),
            "on_bad": settings.on_bad,
            "duplicates": settings.duplicates,
            **source_options,
        },
    }


def _absolute(url: str) -> str:
    """Return a local path as an absolute one, because the entry is read in other folders; a URL as it is."""
    is_url = ("://" in url or "::" in url) and not split_existing(url)[0]
    return url if is_url else os.path.abspath(url)
