"""`datasvc ingest`: any source in, exact versions out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.datasets.key_file import read_lines
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json_line
from datasvc.cli.terminal.values import text_value
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.shards.ingestion.build import IngestProgress, Report
    from datasvc.shards.ingestion.build_options import BuildOptions
    from datasvc.shards.ingestion.ingest import IngestReport
    from datasvc.shards.sources import Source
    from datasvc.shards.versions.split_overlap import Overlap

EXIT_LEFT_OUT = 6
_EVENT_INTERVAL_S = 1.0
_SHOWN = 20
_LISTED_OVERLAPS = 1000


class OnBad(StrEnum):
    """What becomes of samples that do not decode."""

    fail = "fail"
    skip = "skip"


class Duplicates(StrEnum):
    """What becomes of samples that hold the same as another."""

    keep = "keep"
    drop = "drop"
    fail = "fail"


class OnCommonAtAppend(StrEnum):
    """What becomes of keys that the newest version has."""

    fail = "fail"
    drop = "drop"
    keep = "keep"
    replace_ = "replace"


class OnSplitOverlap(StrEnum):
    """What becomes of samples that two splits share."""

    fail = "fail"
    drop = "drop"
    keep = "keep"


class EngineChoice(StrEnum):
    """Who builds the shards."""

    local = "local"
    ray = "ray"


def ingest(
    source: Annotated[str, typer.Argument(help="Folder, file or pattern, local or any fsspec URL.")],
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    repo: RepoOption,
    format: Annotated[str | None, typer.Option(help="What SOURCE is; default: by what lies there.")] = None,  # noqa: A002
    split: Annotated[str | None, typer.Option(help="Put all samples into this split.")] = None,
    key: Annotated[str | None, typer.Option(help="Column that holds the keys.")] = None,
    manifest: Annotated[
        str | None, typer.Option(help="CSV, JSON lines or Parquet file that names files, labels and more columns.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(metavar="FILE", help="Names of integer labels, one a line, that of 0 first.")
    ] = None,
    ground_truth: Annotated[str | None, typer.Option(help="ImageNet validation: its ground-truth file.")] = None,
    synsets: Annotated[str | None, typer.Option(help="ImageNet validation: list of synsets, one a line.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Text to token blocks: a tokenizer.json.")] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = 1024,
    text: Annotated[str, typer.Option(help="Column of JSON lines that holds the text to tokenize.")] = "text",
    shard_size: Annotated[str, typer.Option(help="Sample bytes per shard.")] = "64MiB",
    max_side: Annotated[int | None, typer.Option(help="Scale longer images down to so many pixels.")] = None,
    quality: Annotated[int | None, typer.Option(help="Of images that are encoded again, 1 to 100.")] = None,
    keep_order: Annotated[bool, typer.Option(help="Keep the source's order: no permutation.")] = False,
    seed: Annotated[int, typer.Option(help="Of the permutation that deals samples to shards.")] = 0,
    val_fraction: Annotated[
        float | None,
        typer.Option(help='Share of "train" that becomes "val", by key hash; default: none, of an append its own.'),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="So many samples of each split only.")] = None,
    on_bad: Annotated[OnBad, typer.Option(help="Bad samples: commit nothing, or leave them out.")] = OnBad.fail,
    decode_check: Annotated[bool, typer.Option(help="Decode every image fully.")] = False,
    duplicates: Annotated[
        Duplicates, typer.Option(help="Samples that hold the same as another: report, leave out, or commit nothing.")
    ] = Duplicates.keep,
    append: Annotated[bool, typer.Option(help="Add to the newest version.")] = False,
    on_common: Annotated[
        OnCommonAtAppend,
        typer.Option(help="Append, keys that are there: drop equal samples, keep the old, or replace it."),
    ] = OnCommonAtAppend.fail,
    on_split_overlap: Annotated[
        OnSplitOverlap,
        typer.Option(
            help="Keys or equal images in two splits: commit nothing, drop them from training, or keep both."
        ),
    ] = OnSplitOverlap.fail,
    workers: Annotated[int | None, typer.Option(help="Processes that build shards; default: one a core.")] = None,
    engine: Annotated[EngineChoice, typer.Option(help="This machine, or a Ray cluster.")] = EngineChoice.local,
    dry_run: Annotated[bool, typer.Option(help="Say what would be made, and make nothing.")] = False,
    message: Annotated[str, typer.Option("--message", "-m", help="Kept with the version.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Ingest SOURCE as the next version of data set NAME.

    Example: datasvc ingest ./photos pets --repo ./repo

    SOURCE/train/cat/1.jpg gives split "train" and label "cat"; without split folders all is "train". Interrupted,
    the same command goes on. Exit status 6: committed, but bad samples were left out. With --json: one event a line.
    """
    from datasvc.repository import Repository
    from datasvc.repository.logs.references import check_name
    from datasvc.shards.images.header import Reencoding
    from datasvc.shards.ingestion.build_options import BuildOptions
    from datasvc.shards.ingestion.ingest import choose_val_fraction, held_out_of
    from datasvc.shards.ingestion.ingest import ingest as run_ingest
    from datasvc.shards.sources import SourceOptions
    from datasvc.shards.sources.choose import open_source
    from datasvc.sizes import parse_size

    check_name(name, "data set")
    shard_bytes = parse_size(shard_size)
    options = SourceOptions(
        format, split, key, manifest, ground_truth, synsets, tokenizer, block_tokens=block_tokens, text=text
    )
    listed = open_source(source, options)
    if dry_run:
        own = choose_val_fraction(Repository.open(repo), name, val_fraction, append=True) if append else val_fraction
        fraction = held_out_of(listed, own or 0.0, is_given=val_fraction is not None)
        built = BuildOptions(
            shard_bytes, decode_check, Reencoding(max_side, quality), keep_order, seed, fraction, limit
        )
        _dry_run(listed, built, workers, as_json=as_json)
        return
    with _reporting(name, listed, as_json=as_json) as report:
        done = run_ingest(
            Repository.create(repo),
            listed,
            name,
            source_options=options,
            classes=None if classes is None else read_lines(classes, "class names"),
            shard_bytes=shard_bytes,
            on_bad=on_bad.value,
            decode_check=decode_check,
            duplicates=duplicates.value,
            max_side=max_side,
            quality=quality,
            keep_order=keep_order,
            val_fraction=val_fraction,
            limit=limit,
            seed=seed,
            append=append,
            on_common=on_common.value,
            on_split_overlap=on_split_overlap.value,
            engine=engine.value,
            workers=workers,
            message=message,
            report=report,
        )
    if as_json:
        print_json_line({"event": "committed", **_facts(done)})
    else:
        _print_report(done)
    if done.bad:
        sys.exit(EXIT_LEFT_OUT)


@contextmanager
def _reporting(name: str, source: Source, *, as_json: bool) -> Iterator[Report]:
    """Show a bar on a terminal, or print events."""
    if as_json:
        print_json_line({"event": "listed", "format": source.kind, "bytes": source.size_bytes})
        yield _EventPrinter().report
        return
    with byte_progress(f"ingesting {name}") as (set_total, advance):
        set_total(source.size_bytes)
        yield lambda progress: advance(progress.size_bytes)


class _EventPrinter:
    """Prints how far an ingest is, about once a second."""

    def __init__(self) -> None:
        self._started = self._printed = time.monotonic()
        self._samples = self._bytes = self._shards = 0

    def report(self, progress: IngestProgress) -> None:
        self._samples += progress.num_samples
        self._bytes += progress.size_bytes
        self._shards += progress.num_shards
        now = time.monotonic()
        if progress.num_shards or now - self._printed >= _EVENT_INTERVAL_S:
            self._printed = now
            done = {"samples": self._samples, "bytes": self._bytes, "shards": self._shards}
            print_json_line({"event": "progress", "seconds": round(now - self._started, 3), **done})


def _dry_run(source: Source, options: BuildOptions, workers: int | None, *, as_json: bool) -> None:
    from datasvc.shards.ingestion.dry_run import dry_run
    from datasvc.shards.ingestion.ingest import count_workers
    from datasvc.sizes import format_size

    found = dry_run(source, options, workers=count_workers(source, workers))
    columns = {field.name: str(field.type) for field in found.schema}
    if as_json:
        facts = {
            **asdict(found),
            "schema": columns,
            "bad": [asdict(sample) for sample in found.bad],
        }
        print_json_line({"event": "planned", **facts})
        return
    about = "about " if found.is_estimate else ""
    samples = {
        split: "known once read" if count is None else f"{about}{count}" for split, count in found.num_samples.items()
    }
    print_facts(
        {
            "format": found.kind,
            "samples": samples,
            "source": format_size(found.size_bytes),
            "shards": f"{about}{found.num_shards}",
            "time": f"about {found.seconds:.0f} s",
            "columns": columns,
            "classes": len(found.classes),
            "bad among the first": len(found.bad),
        }
    )


def _facts(done: IngestReport) -> dict[str, Any]:
    return {
        "version": str(done.version),
        "samples": done.num_samples,
        "shards": done.num_shards,
        "bytes": done.size_bytes,
        "added": done.num_added,
        "left_out": done.num_left_out,
        "skipped": [asdict(sample) for sample in done.bad],
        "duplicates": {split: [asdict(each) for each in found] for split, found in done.duplicates.items()},
        "overlaps": [overlap_facts(overlap) for overlap in done.overlaps],
        "ignored": dict(done.ignored),
        "resumed_shards": done.num_resumed,
        "source_changed": done.has_source_changed,
    }


def overlap_facts(overlap: Overlap) -> dict[str, Any]:
    """Return what two splits share as JSON values: how many samples, and the first of them."""
    return {
        "kind": overlap.kind,
        "split": overlap.split,
        "other": overlap.other,
        "num_samples": len(overlap.samples),
        "samples": [
            {"key": sample.key, "other_key": sample.other_key} for sample in overlap.samples.first(_LISTED_OVERLAPS)
        ],
    }


def _print_report(done: IngestReport) -> None:
    from datasvc.sizes import format_size

    num_shards = sum(done.num_shards.values())
    typer.echo(
        f"committed {done.version}: {_counted(done.num_samples)} samples, {num_shards} shards, "
        f"{format_size(done.size_bytes)}"
    )
    if done.num_left_out:
        typer.echo(
            f"added {_counted(done.num_added)} samples; left out {_counted(done.num_left_out)} samples of earlier "
            "versions, which were replaced or are in another split"
        )
    if done.num_resumed:
        typer.echo(f"went on where it was interrupted: {done.num_resumed} shards were there", err=True)
    if done.has_source_changed:
        typer.echo("the source has changed since it was interrupted, so it began anew", err=True)
    for sample in done.bad[:_SHOWN]:
        typer.echo(f"skipped {sample.split}/{sample.key}: {sample.reason}", err=True)
    if done.bad:
        typer.echo(
            f"{len(done.bad)} bad samples were left out; `datasvc show --json` has the list of them as `quarantine`",
            err=True,
        )
    repeats = [(split, each) for split, found in done.duplicates.items() for each in found]
    for split, repeat in repeats[:_SHOWN]:
        typer.echo(f"duplicate {split}/{repeat.key}: holds the same as {repeat.first_key}", err=True)
    if len(repeats) > _SHOWN:
        typer.echo(f"{len(repeats)} duplicates in all", err=True)
    for overlap in done.overlaps:
        typer.echo(text_value(str(overlap)), err=True)
    if done.ignored:
        typer.echo(f"ignored: {dict(done.ignored)}", err=True)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in counts.items())
