"""`datasvc ingest` and `datasvc attach`: make a source the next version of a data set."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json_line, print_line, resumable
from datasvc.errors import ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.progress import Progress, byte_progress
from datasvc.sizes import format_size, parse_size

if TYPE_CHECKING:
    from datasvc.shards.ingestion.dry_run import DryRun
    from datasvc.shards.ingestion.ingest import IngestReport
    from datasvc.shards.sources import Source
    from datasvc.shards.versions.label_conflicts import LabelConflict
    from datasvc.shards.versions.split_overlap import Overlap


EXIT_LEFT_OUT = 6  # committed without the bad samples
_EVENT_INTERVAL_S = 1.0
_MAX_SHOWN = 20  # largest number of bad samples, and of duplicates, to print
_MAX_OVERLAPS_IN_JSON = 1000

LabelColumnOption = Annotated[
    str | None, typer.Option(help="Column with the labels: whole numbers, booleans, or names of classes.")
]
AsTextOption = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN", help="Column of text, whose values stay as written; may be given several times."),
]
AsBytesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD", help="Field of a WebDataset, such as mp4, that stays bytes; may be given several times."
    ),
]
ClassesOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Class names of integer labels, one per line, label 0 first.")
]


@options_from(
    "shards.sources.common.options.SourceOptions",
    "shards.ingestion.options.IngestSettings",
    in_order="source name repo format split key key_prefix label_column as_text as_bytes first_frame manifest "
    "classes ground_truth synsets tokenizer chat_template block_tokens text shard_size compress_columns max_side "
    "quality keep_order seed val_fraction limit on_bad decode_check duplicates append on_common on_split_overlap "
    "workers engine dry_run message as_json",
    **{name: typer.Option() for name in ("keep_order", "decode_check", "append")},  # with --no-
)
def ingest(
    source: Annotated[str, typer.Argument(help="Folder, file or pattern, local or any fsspec URL.")],
    name: Annotated[str, reference("Name of the data set, or NAME@BRANCH.", None)],
    repo: RepoOption,
    label_column: LabelColumnOption = None,
    as_text: AsTextOption = None,
    as_bytes: AsBytesOption = None,
    classes: ClassesOption = None,
    shard_size: Annotated[str, typer.Option(help="Sample bytes per shard.")] = "64MiB",
    workers: Annotated[int | None, typer.Option(help="Processes that build shards; default: one per core.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Print what would be created, and create nothing.")] = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Ingest SOURCE as the next version of data set NAME.

    Example: datasvc ingest ./photos pets --repo ./repo

    SOURCE/train/cat/1.jpg becomes a sample of split "train" with label "cat"; without split folders, all samples are
    in "train". After an interruption, the same command continues. Exit status 6 means: committed without the bad
    samples. --json prints one event per line.
    """
    from datasvc.repository import Repository
    from datasvc.repository.logs.references import parse_line
    from datasvc.shards.ingestion.dry_run import dry_run_ingest
    from datasvc.shards.ingestion.ingest import ingest as run_ingest

    parse_line(name)
    options |= {"shard_bytes": parse_size(shard_size), "workers": workers}
    opened = _open(source, options, label=label_column, as_text=as_text, as_bytes=as_bytes)
    if dry_run:
        # Without --append, the repository need not exist yet.
        repository = Repository.open(repo) if options["append"] else None
        _print_dry_run(dry_run_ingest(repository, opened, name, **options), as_json=as_json)
        return
    names = None if classes is None else read_lines(classes, "class names")
    _run(run_ingest, repo, opened, name, as_json=as_json, classes=names, **options)


@options_from(
    "shards.sources.common.options.SourceOptions",
    "shards.ingestion.attach.attach",
    in_order="source name repo format split key key_prefix label_column as_text as_bytes classes shard_size "
    "val_fraction on_bad duplicates append on_common on_split_overlap workers message as_json",
    append=typer.Option(),  # with --no-
)
def attach(
    source: Annotated[
        str,
        typer.Argument(help="WebDataset tars or Parquet files: folder, file or pattern, local or any fsspec URL."),
    ],
    name: Annotated[str, reference("Name of the data set, or NAME@BRANCH.", None)],
    repo: RepoOption,
    label_column: LabelColumnOption = None,
    as_text: AsTextOption = None,
    as_bytes: AsBytesOption = None,
    classes: ClassesOption = None,
    shard_size: Annotated[str, typer.Option(help="Bytes of a file that are one shard.")] = "64MiB",
    workers: Annotated[int | None, typer.Option(help="Processes that read files; default: one per core.")] = None,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Make the tars or Parquet files of SOURCE the next version of data set NAME, and leave their bytes in place.

    Example: datasvc attach "s3://bucket/wds/train-{000..146}.tar" pets --repo ./repo

    Each file is read once, and its keys and digests are stored. Shards are built from the files when they are needed,
    once per node with a cache. After an interruption, the same command continues. Exit status 6 means: committed
    without the bad samples. --json prints one event per line.
    """
    from datasvc.repository.logs.references import parse_line
    from datasvc.shards.ingestion.attach import attach as run_attach

    parse_line(name)
    options |= {"shard_bytes": parse_size(shard_size), "workers": workers}
    opened = _open(source, options, label=label_column, as_text=as_text, as_bytes=as_bytes)
    names = None if classes is None else read_lines(classes, "class names")
    _run(run_attach, repo, opened, name, as_json=as_json, classes=names, **options)


def _open(
    source: str,
    options: dict[str, Any],
    *,
    label: str | None,
    as_text: Sequence[str] | None,
    as_bytes: Sequence[str] | None,
) -> Source:
    """Return the opened source; replace the options of the source in `options` by `source_options`."""
    from datasvc.shards.sources import SourceOptions
    from datasvc.shards.sources.choose import open_source

    options["source_options"] = SourceOptions(
        label=label,
        as_text=tuple(as_text or ()),
        as_bytes=tuple(as_bytes or ()),
        **{field.name: options.pop(field.name) for field in fields(SourceOptions) if field.name in options},
    )
    return open_source(source, options["source_options"])


def _run(
    ingest_or_attach: Callable[..., IngestReport],
    repo: str,
    source: Source,
    name: str,
    *,
    as_json: bool,
    **options: Any,
) -> None:
    """Ingest or attach an opened source, and print what was committed."""
    from datasvc.repository import Repository

    if source.ignored and not as_json:
        # Before the ingest, so that it can be stopped: photos may be among them, such as .heic.
        print_line(f"ignored files: {format_ignored(source.ignored)}", err=True)
    with resumable(), _show_progress(name, source, as_json=as_json) as progress:
        report = ingest_or_attach(Repository.create(repo), source, name, progress=progress, **options)
    if as_json:
        print_json_line({"event": "committed", **_facts(report)})
    else:
        _print_report(report)
    if report.bad:
        sys.exit(EXIT_LEFT_OUT)


@contextmanager
def _show_progress(name: str, source: Source, *, as_json: bool) -> Iterator[Progress]:
    """Show a progress bar on a terminal; with `as_json`, print events instead."""
    if as_json:
        print_json_line({"event": "listed", "format": source.kind, "bytes": source.size_bytes})
        yield _EventPrinter()
        return
    with byte_progress(f"ingesting {name}") as progress:
        yield progress


class _EventPrinter(Progress):
    """Prints progress as JSON lines: one for each finished shard, and otherwise at most one per second."""

    def __init__(self) -> None:
        self._started = self._printed = time.monotonic()
        self._samples = self._bytes = self._shards = 0

    def advance(self, amount: int, *, num_samples: int = 0, num_shards: int = 0, **_: object) -> None:
        self._samples += num_samples
        self._bytes += amount
        self._shards += num_shards
        now = time.monotonic()
        if num_shards or now - self._printed >= _EVENT_INTERVAL_S:
            self._printed = now
            counts = {"samples": self._samples, "bytes": self._bytes, "shards": self._shards}
            print_json_line({"event": "progress", "seconds": round(now - self._started, 3), **counts})


def _print_dry_run(plan: DryRun, *, as_json: bool) -> None:
    columns = {field.name: str(field.type) for field in plan.schema}
    if as_json:
        print_json_line({"event": "planned", **asdict(plan), "schema": columns})
        return
    about = "about " if plan.is_estimate else ""
    samples = {
        split: "unknown before the source is read" if count is None else f"{about}{count}"
        for split, count in plan.num_samples.items()
    }
    print_facts(
        {
            "format": plan.kind,
            "samples": samples,
            "source": format_size(plan.size_bytes),
            "shards": f"{'about ' if plan.has_estimated_shards else ''}{plan.num_shards}",
            "time": f"about {plan.seconds:.0f} s",
            "columns": columns,
            "classes": len(plan.classes),
            "bad samples among the first": len(plan.bad),
            "ignored files": format_ignored(plan.ignored) or "none",
            **({"options changed": _format_options(plan.changed_options)} if plan.changed_options else {}),
        }
    )


def _format_options(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {now} (before: {before})" for name, (before, now) in changed.items())


def _facts(report: IngestReport) -> dict[str, Any]:
    return {
        "version": str(report.version),
        "samples": report.num_samples,
        "shards": report.num_shards,
        "bytes": report.size_bytes,
        "added": report.num_added,
        "left_out": report.num_left_out,
        "skipped": [asdict(sample) for sample in report.bad],
        "duplicates": {split: [asdict(pair) for pair in pairs] for split, pairs in report.duplicates.items()},
        "overlaps": [overlap_facts(overlap) for overlap in report.overlaps],
        "conflicts": [conflict._asdict() for conflict in report.conflicts],
        "changed_options": report.changed_options,
        "ignored": dict(report.ignored),
        "class_spread": dict(report.class_spread),
        **({"compression": dict(report.compression)} if report.compression else {}),
        "resumed_shards": report.num_resumed,
        "source_changed": report.has_source_changed,
    }


def overlap_facts(overlap: Overlap) -> dict[str, Any]:
    """Return the overlap of two splits as JSON values: the number of shared samples, and the first of them."""
    return {
        "kind": overlap.kind,
        "split": overlap.split,
        "other": overlap.other,
        "num_samples": len(overlap.samples),
        "samples": [
            {"key": sample.key, "other_key": sample.other_key}
            for sample in overlap.samples.first(_MAX_OVERLAPS_IN_JSON)
        ],
    }


def _print_report(report: IngestReport) -> None:
    num_shards = sum(report.num_shards.values())
    print_line(
        f"committed {report.version}: {format_counts(report.num_samples)} samples, "
        f"{count_text(num_shards, 'shard')}, {format_size(report.size_bytes)}"
    )
    if report.num_left_out:
        print_line(
            f"added {format_counts(report.num_added)} samples; left out {format_counts(report.num_left_out)} "
            "samples of earlier versions, which were replaced or are in another split"
        )
    # Notes and warnings go to standard error, so that standard output has only the result.
    if report.num_resumed:
        print_line(
            f"resumed an interrupted ingest: {count_text(report.num_resumed, 'shard')} already stored", err=True
        )
    if report.has_source_changed:
        print_line("the source has changed since the interrupted ingest, so all shards were built again", err=True)
    for sample in report.bad[:_MAX_SHOWN]:
        print_line(f"skipped {sample.split}/{sample.key}: {sample.reason}", err=True)
    if report.bad:
        print_line(
            f"{count_text(len(report.bad), 'bad sample')} left out; `datasvc show {report.version} --bad` lists them",
            err=True,
        )
    duplicates = [(split, pair) for split, pairs in report.duplicates.items() for pair in pairs]
    for split, pair in duplicates[:_MAX_SHOWN]:
        print_line(f"duplicate {split}/{pair.key}: same content as {pair.first_key}", err=True)
    if len(duplicates) > _MAX_SHOWN:
        print_line(f"{count_text(len(duplicates), 'duplicate')} in total", err=True)
    for overlap in report.overlaps:
        print_line(str(overlap), err=True)
    if report.changed_options:
        print_line(
            f"options differ from those of the version before: {_format_options(report.changed_options)}", err=True
        )
    from datasvc.shards.versions.describe import MAX_SPREAD, describe_compression, describe_spread

    for split, compression in report.compression.items():
        print_line(f"{split}: {describe_compression(compression)}", err=True)
    for split, spread in report.class_spread.items():
        if spread > MAX_SPREAD:
            print_line(f"{split}: {describe_spread(spread)}", err=True)
    print_conflicts(report.conflicts)


def print_conflicts(conflicts: Sequence[LabelConflict]) -> None:
    """Print contradicting labels of equal samples on standard error, if there are any."""
    if conflicts:
        from datasvc.shards.versions.label_conflicts import describe_conflicts

        print_line(describe_conflicts(conflicts), err=True)


def format_ignored(ignored: Mapping[str, int]) -> str:
    """Return the number of ignored files of each extension as text: `2 .txt, 1 without an extension`."""
    counts = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
    from datasvc.shards.sources.common.file_checks import unread_pictures

    advice = unread_pictures(ignored)
    return ", ".join(
        f"{count} without an extension" if extension == "(none)" else f"{count} {extension}"
        for extension, count in counts
    ) + (f"; {advice}" if advice else "")


def format_counts(counts: Mapping[str, int]) -> str:
    """Return the number of samples of each split as text: `7 train, 2 val`."""
    return ", ".join(f"{count} {split}" for split, count in counts.items())


def read_keys(path: str) -> list[str]:
    """Return the non-empty lines of a file; "-" is standard input. For errors, see `read_lines`."""
    return [line for line in read_lines(path, "keys") if line]


def chosen_keys(sample: Sequence[str] | None, keys: str | None) -> list[str]:
    """Return the keys of `--sample KEY` and of the file of `--keys`. For errors, see `read_lines`."""
    return [*(sample or []), *(read_keys(keys) if keys is not None else [])]


def read_lines(path: str, what: str) -> list[str]:
    """Return the lines of a text file, without empty lines at its end.

    Args:
        path: file to read; "-" is standard input.
        what: what the file contains, such as "keys", for error messages.

    Raises:
        NotFoundError: the file does not exist.
        ConfigError: `path` is a folder, or the file is not UTF-8.
    """
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        # Editors on Windows begin a file with a byte-order mark, which would become part of the first key.
        text = raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError(f"file {path} with the {what} does not exist; check the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; expected a file with {what}, one per line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); expected a text file with {what}, one per line") from error
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]
