"""Ingest: a source becomes the next version of a data set.

What goes where is planned from the source's listing and the options alone (`plan`), units of work are built by
whatever engine (`engines`), and all objects are stored before the one commit: whatever fails before it leaves nothing
visible. Finished shards are recorded in a journal, so the same command goes on where an interrupted one stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from datasvc.errors import ConfigError, SourceChangedError, UnavailableError
from datasvc.processors import count_processors
from datasvc.repository import ObjectInfo, Objects, Repository, Resolved
from datasvc.repository.logs.journal import Journal
from datasvc.repository.logs.references import check_name
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.storage import redact_url
from datasvc.shards.format.schema import stored_schema
from datasvc.shards.format.shard_table import ShardTable, TableRow
from datasvc.shards.images.header import Reencoding
from datasvc.shards.ingestion.build import BuiltShard, IngestProgress, IngestWork, Report, UnitResult
from datasvc.shards.ingestion.build_options import SHARD_BYTES, BuildOptions
from datasvc.shards.ingestion.duplicates import Repeat, Repeats, drop_repeats
from datasvc.shards.ingestion.executors import EngineName, run_units
from datasvc.shards.ingestion.ingest_commit import LEFT_OUT, IngestCommit
from datasvc.shards.ingestion.lean_memory import lean_arrow
from datasvc.shards.ingestion.plan import IngestUnit, plan_units, relabelled
from datasvc.shards.ingestion.quarantine import check_bad, check_duplicates, store_quarantine
from datasvc.shards.sources.choose import open_source
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, ListedSource, Source, StreamedSource
from datasvc.shards.sources.common.splits import DEFAULT_SPLIT, HELD_OUT_SPLIT
from datasvc.shards.sources.python_samples import PythonSource
from datasvc.shards.versions.class_names import name_tables
from datasvc.shards.versions.combine import OnCommon
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.labels import combine_classes, plan_labels
from datasvc.shards.versions.split_overlap import OnSplitOverlap, Overlap, check_on_overlap
from datasvc.shards.versions.version_entry import VAL_FRACTION, read_val_fraction

OnBad = Literal["fail", "skip"]
Duplicates = Literal["keep", "drop", "fail"]

PLAN_FORMAT = 1  # part of a journal's name: shards made by another rule are never continued


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        version: the committed version.
        num_samples: samples in each split of the version.
        num_shards: shards in each split of the version.
        size_bytes: bytes of all shards of the version.
        num_added: samples of this source in each split of the version.
        num_left_out: samples of the version before that an append leaves out, by split, if there are any: they were
            replaced, or another split has them, with "drop".
        bad: samples that were left out because they are damaged or repeat a key.
        duplicates: samples that hold the same as an earlier one of their split, by split; left out with "drop".
        overlaps: samples that two splits shared: left out of one with "drop".
        ignored: files of the source that it does not ingest, by extension.
        num_resumed: shards that an earlier, interrupted run had stored.
        has_source_changed: an interrupted run was of another state of the source, so that it was not continued.
    """

    version: Resolved
    num_samples: dict[str, int]
    num_shards: dict[str, int]
    size_bytes: int
    num_added: dict[str, int]
    num_left_out: dict[str, int]
    bad: list[BadSample] = field(default_factory=list)
    duplicates: Mapping[str, Sequence[Repeat]] = field(default_factory=dict)
    overlaps: Sequence[Overlap] = ()
    ignored: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    has_source_changed: bool = False


@lean_arrow()
def ingest(
    repository: Repository,
    source: str | Source | Iterable[Mapping[str, Any]],
    name: str,
    *,
    source_options: SourceOptions | None = None,
    classes: Sequence[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bad: OnBad = "fail",
    decode_check: bool = False,
    duplicates: Duplicates = "keep",
    max_side: int | None = None,
    quality: int | None = None,
    keep_order: bool = False,
    val_fraction: float | None = None,
    limit: int | None = None,
    seed: int = 0,
    append: bool = False,
    on_common: OnCommon = "fail",
    on_split_overlap: OnSplitOverlap = "fail",
    engine: EngineName = "local",
    workers: int | None = 1,
    message: str = "",
    report: Report | None = None,
) -> IngestReport:
    """Ingest a source as the next version of data set `name`. Existing versions are untouched.

    Args:
        repository: where to.
        source: folder, file or any fsspec URL; a source that was listed already; or an iterable of samples, dicts of
            Python values by column, which is read once and by this process.
        name: of the data set, made when new.
        source_options: what the source is and how to read it.
        classes: names of the classes of a source whose labels are integers without names; that of label 0 first.
        shard_bytes: sample bytes at which a shard is full.
        on_bad: "fail" commits nothing when a sample is bad, after all were looked at; "skip" leaves it out.
        decode_check: decode every image fully rather than check its header and its end.
        duplicates: samples that hold the same as an earlier one of their split: "keep" and report them, "drop" them,
            or "fail".
        max_side: scale longer images down to so many pixels on their longer side, and encode them again.
        quality: of images that are encoded again, 1 to 100; without `max_side` all JPEG and WebP images are.
        keep_order: keep the source's order rather than deal samples to shards by a permutation.
        val_fraction: share of "train" that becomes "val", by the hash of each key, so it stays when data is added;
            None: none, and of an append that of the data set.
        limit: ingest so many samples of each split only: the first of the source.
        seed: of the permutation that deals samples to shards.
        append: add the samples to those of the newest version.
        on_common: append: what becomes of keys that the newest version has, in whatever split, see
            `combine.append_table`, `combine.keep_splits`.
        on_split_overlap: what becomes of samples that two splits of the version share, by key or by equal blobs.
        engine: "local" processes, or a "ray" cluster.
        workers: processes that build shards; 1: this one; None: one for each core.
        message: kept with the version.
        report: called with what was done since it was called last.

    Raises:
        ConfigError: an option is out of range, the source's layout is mixed, its columns contradict each other or
            those that it is appended to.
        NotFoundError: the source is not there or holds no sample.
        BadSampleError: samples are bad and `on_bad` is "fail", or duplicates and "fail"; names and counts them.
        SourceChangedError: a file changed after it was listed.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`, `combine.append_table`,
            `split_overlap.settle_overlaps`.
    """
    check_name(name, "data set")
    check_on_overlap(on_split_overlap)
    _check_choice("on_bad", on_bad, ("fail", "skip"))
    _check_choice("duplicates", duplicates, ("keep", "drop", "fail"))
    _check_choice("engine", engine, ("local", "ray"))
    opened = open_any_source(source, source_options)
    own_fraction = choose_val_fraction(repository, name, val_fraction, append=append)
    fraction = held_out_of(opened, own_fraction, is_given=val_fraction is not None)
    options = BuildOptions(
        shard_bytes, decode_check, Reencoding(max_side, quality), keep_order, seed, fraction, limit
    )
    if classes is not None and opened.classes:
        raise ConfigError(f"{redact_url(opened.url)} has class names of its own; leave --classes away")
    num_workers = count_workers(opened, workers, engine)
    head_classes = _classes_of_head(repository, name) if append and opened.classes else ()
    source_classes = combine_classes(head_classes, [opened.classes])
    plan = _make_plan(repository, name, opened, options, source_classes)
    with ExitStack() as until:
        results, num_resumed = _build(plan, engine, num_workers, report or _ignore, until)
        if isinstance(source, str) or source_options is not None:
            _check_unchanged(plan, source_options)
        tables = _tables(plan, results)
        if classes is not None:
            tables |= name_tables(tables, classes)
        # A file system gives no two files one path.
        repeats = Repeats.find(repository.objects, tables, by_key=not isinstance(opened, ListedSource))
        bad = [sample for result in results for sample in result.bad]
        check_bad(bad, repeats.bad, tables, opened, fails=on_bad == "fail")
        bad += repeats.bad
        if duplicates == "fail":
            check_duplicates(repeats.payloads, opened)
        dropped = [repeats.keys, *([repeats.payloads] if duplicates == "drop" else [])]
        tables = drop_repeats(repository.objects, tables, dropped)
        about = {
            "message": message,
            "source": _describe(plan, source_options, on_bad=on_bad, duplicates=duplicates),
            "skipped": len(bad),
            "quarantine": store_quarantine(repository.objects, bad),
            VAL_FRACTION: own_fraction,
        }
        commit = IngestCommit(
            repository,
            name,
            tables,
            about,
            attempt=plan.attempt,
            append=append,
            on_common=on_common,
            on_overlap=on_split_overlap,
            keys_are_places=opened.keys_are_places,
        )
        committed = commit.run()
        with suppress(UnavailableError):  # it is committed: what is left of the journal is for `gc`
            plan.journal.remove()
    splits = committed.content["splits"]
    return IngestReport(
        version=Resolved("datasets", name, committed.number),
        num_samples={split: facts["samples"] for split, facts in splits.items()},
        num_shards={split: facts["shards"] for split, facts in splits.items()},
        size_bytes=sum(facts["bytes"] for facts in splits.values()),
        num_added=committed.content["added"],
        num_left_out=committed.content.get(LEFT_OUT, {}),
        bad=bad,
        duplicates=repeats.payloads,
        overlaps=commit.overlaps,
        ignored=opened.ignored,
        num_resumed=num_resumed,
        has_source_changed=plan.has_source_changed,
    )


def open_any_source(
    source: str | Source | Iterable[Mapping[str, Any]], options: SourceOptions | None = None
) -> Source:
    """Return a listed source for whatever `ingest` takes as one. Raises as `open_source`."""
    if isinstance(source, Source):
        return source
    if isinstance(source, (str, os.PathLike)):
        return open_source(os.fspath(source), options)
    return PythonSource(source, options)


@dataclass(frozen=True)
class _Plan:
    """All that is decided before anything is read."""

    name: str
    repository: Repository
    work: IngestWork
    units: Sequence[IngestUnit]
    journal: Journal
    attempt: str
    has_source_changed: bool


def _make_plan(
    repository: Repository, name: str, source: Source, options: BuildOptions, classes: tuple[str, ...]
) -> _Plan:
    mapping = plan_labels(source.classes, classes)
    labels = tuple(mapping[label] for label in range(len(mapping))) if mapping else None
    schema = stored_schema(source.schema)
    about = [PLAN_FORMAT, name, source.kind, redact_url(source.url), list(classes), str(schema)]
    plan = digest_of(json.dumps([about, dataclasses.asdict(options)], sort_keys=True).encode())
    fingerprint = source.fingerprint()
    journal = repository.journal(plan, fingerprint)
    attempt, has_changed = journal.begin()
    units = plan_units(source, options)
    units = [relabelled(unit, labels) for unit in units] if labels else units
    slim = source.without_files() if isinstance(source, ListedSource) else source
    work = IngestWork(repository.url, plan, fingerprint, attempt, slim, schema, options, classes, labels)
    has_changed = has_changed and not isinstance(source, PythonSource)  # no two iterables are states of one
    return _Plan(name, repository, work, units, journal, attempt, has_changed)


def _check_unchanged(plan: _Plan, options: SourceOptions | None) -> None:
    """Raise SourceChangedError where another listing says something else now than the one that was ingested.

    Local files of a listed source are each compared as they are read.
    """
    source = plan.work.source
    if isinstance(source, PythonSource) or (isinstance(source, ListedSource) and FileReader(source.url).is_local):
        return
    if open_source(source.url, options).fingerprint() != plan.work.fingerprint:
        raise SourceChangedError(
            f"{redact_url(source.url)} changed while it was ingested, nothing was committed; run the same command "
            "again once nothing writes to it any more"
        )


def _build(
    plan: _Plan, engine: EngineName, workers: int, report: Report, until: ExitStack
) -> tuple[list[UnitResult], int]:
    """Build what is not built yet; returns the results of all units in order, and how many shards were there."""
    done, earlier = _read_journal(plan)
    results = {result.number: result for result in done}
    num_resumed = sum(len(result.shards) for result in done) + sum(map(len, earlier.values()))
    for unit in plan.units:
        if unit.number in results:
            shards = results[unit.number].shards
            num_samples = sum(shard.row.statistics.num_samples for shard in shards)
            report(IngestProgress(num_samples, unit.size_bytes, len(shards)))

    def take(result: UnitResult) -> None:
        results[result.number] = result

    left = [unit for unit in plan.units if unit.number not in results]
    run_units(
        plan.work,
        left,
        plan.repository,
        earlier,
        engine=engine,
        workers=workers,
        report=report,
        on_result=take,
        until=until,
    )
    return [results[unit.number] for unit in plan.units], num_resumed


def _read_journal(plan: _Plan) -> tuple[list[UnitResult], dict[int, dict[tuple[str, int], BuiltShard]]]:
    """Return the units that are done, and the shards of those that are not; only what the repository still has."""
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
                earlier.setdefault(int(name[:8]), {})[shard.split, shard.ordinal] = shard
    for result in done:
        earlier.pop(result.number, None)
    return done, earlier


def _is_stored(objects: Objects, shard: BuiltShard) -> bool:
    """Return whether the repository still has a recorded shard and its index, safe from a `gc` that runs just now."""
    index = shard.row.index
    assert index is not None
    index_bytes = objects.size(index)
    return (
        index_bytes is not None
        and objects.refresh(ObjectInfo(index, index_bytes))
        and objects.refresh(shard.row.shard)
    )


def _tables(plan: _Plan, results: Sequence[UnitResult]) -> dict[str, ShardTable]:
    """Return the shard table of each split that has samples, its shards in the order of the plan."""
    rows: dict[str, list[TableRow]] = {}
    for result in results:
        for shard in result.shards:
            rows.setdefault(shard.split, []).append(shard.row)
    return {split: ShardTable.build(each, plan.work.schema, plan.work.classes) for split, each in rows.items()}


def choose_val_fraction(repository: Repository, name: str, given: float | None, *, append: bool) -> float:
    """Return the share of `train` that a data set holds out as `val`: `given`, or of an append the data set's own.

    Raises:
        ConfigError: an append is given another than the data set's own.
        CorruptDataError, UnavailableError: the data set's entries cannot be read.
    """
    head = repository.versions("datasets", name).head() if append else 0
    if not head:
        return given or 0.0
    newest = Resolved("datasets", name, head)
    own = read_val_fraction(repository, newest)
    if given is not None and given != own:
        raise ConfigError(
            f"{newest} holds out {own:g} of its samples as {HELD_OUT_SPLIT!r}, and an append keeps that share: got "
            f"--val-fraction {given:g}; leave it away"
        )
    return own


def held_out_of(source: Source, fraction: float, *, is_given: bool) -> float:
    """Return the share to hold out of a source: none where it has splits of its own, unless one `is_given`."""
    if isinstance(source, ListedSource):
        splits = set(source.splits)
    else:
        assert isinstance(source, StreamedSource)
        splits = {part.split for part in source.parts}
    return fraction if is_given or (DEFAULT_SPLIT in splits and HELD_OUT_SPLIT not in splits) else 0.0


def _classes_of_head(repository: Repository, name: str) -> tuple[str, ...]:
    """Return the class names of the newest version, () where there is none."""
    if not repository.versions("datasets", name).head():
        return ()
    return max((split.classes for split in open_dataset(repository, name).values()), key=len)


def count_workers(source: Source, workers: int | None, engine: EngineName = "local") -> int:
    """Return how many processes build the shards of `source`; None: one a core.

    Raises:
        ConfigError: less than one, or an iterable, which lives in this process, is to be read on a cluster.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}; expected at least 1")
    if isinstance(source, PythonSource):
        if engine != "local":
            raise ConfigError("an iterable is read by this process; leave engine='ray' away, or write it to files")
        return 1
    return count_processors() if workers is None else workers


def _describe(plan: _Plan, options: SourceOptions | None, **choices: str) -> dict[str, Any]:
    """Return what the entry says of the source: without credentials."""
    given = {
        name: redact_url(value) if isinstance(value, str) else value
        for name, value in dataclasses.asdict(options or SourceOptions()).items()
        if value != getattr(SourceOptions(), name)
    }
    built = dataclasses.asdict(plan.work.options)
    reencoding = built.pop("reencoding")
    source = plan.work.source
    return {
        "kind": source.kind,
        "url": redact_url(source.url),
        "options": {**built, **reencoding, **choices, **given},
    }


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; expected {' or '.join(map(repr, choices))}")


def _ignore(_: IngestProgress) -> None:
    """Nobody wants to know."""
