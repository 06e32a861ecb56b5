"""`datasvc show | head | sql`: the metadata and the samples of a data-set version."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.output import (
    CsvOption,
    JsonOption,
    QueryArgument,
    RepoOption,
    SamplesArgument,
    SplitOption,
    WhereOption,
    check_one_format,
    print_facts,
    print_json,
    print_line,
    print_query_result,
    print_table,
    short_text_value,
)
from datasvc.errors import BadSampleError, CorruptDataError
from datasvc.printable import count_text, json_value, text_value

if TYPE_CHECKING:
    from rich.console import Console

    from datasvc.cli.terminal.terminal_image import ImageProtocol
    from datasvc.shards.query.contact_sheet import Preview

_MAX_CLASSES = 20
_MAX_BAR_CHARACTERS = 40


def show(
    ref: SamplesArgument,
    repo: RepoOption,
    bad: Annotated[
        bool, typer.Option("--bad", help="List the bad samples that its ingest left out, and the reasons.")
    ] = False,
    confusion: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Count the pairs of values of two columns, such as label label_old."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a data-set version: its origin, splits, statistics, columns and classes.

    Example: datasvc show pets@1 --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.describe import describe_version, read_bad_samples

    if bad:
        samples = read_bad_samples(Repository.open(repo), ref)
        if as_json:
            print_json(samples)
        else:
            rows = [(sample["split"], sample["key"], sample["reason"]) for sample in samples]
            print_table(("split", "key", "reason"), rows)
        return
    if confusion is not None:
        from datasvc.shards.query.histogram import confusion as count_pairs

        _print_confusion(count_pairs(Repository.open(repo), ref, *confusion), *confusion, as_json=as_json)
        return
    from datasvc.shards.versions.describe import CLASS_SPREAD, COMPRESSION, describe_compression, describe_spread

    facts = describe_version(Repository.open(repo), ref)
    if as_json:
        print_json(facts)
        return
    print_facts({"version": facts["version"], **removal_line(facts.get("removal"))})
    if facts.get("tags"):
        print_facts({"tags": ", ".join(facts["tags"])})
    if facts.get("head_of"):
        print_facts({"head of branch": ", ".join(facts["head_of"])})
    head = {
        name: facts[name]
        for name in ("created", "branch", "parent", "merged", "change")
        if facts.get(name) is not None
    }
    try:
        head |= {"message": facts["message"] or "-", "source": facts["source"]["url"], "skipped": facts["skipped"]}
    except (KeyError, TypeError) as error:
        raise CorruptDataError(f"the entry of {facts['version']} is not valid: {error!r}") from error
    if facts["source"].get("options", {}).get("in_place"):
        head["in place"] = "the shards are built from the files of the source, which the repository has no copy of"
    if facts.get("ignored"):
        from datasvc.cli.datasets.ingest import format_ignored  # here, because most versions do not need it

        head["ignored files"] = format_ignored(facts["ignored"])
    print_facts(head)
    for name, split in facts["splits"].items():
        if facts.get("removed"):
            print_facts({f"split {name}": split})
        else:
            _print_split(name, split)
            if (spread := facts.get(CLASS_SPREAD, {}).get(name)) is not None:
                print_line(f"  classes over shards: {describe_spread(spread)}")
            if (compression := facts.get(COMPRESSION, {}).get(name)) is not None:
                print_line(f"  shards of this ingest: {describe_compression(compression)}")


def _print_confusion(
    splits: Mapping[str, list[tuple[str, str, int]]], first: str, second: str, *, as_json: bool
) -> None:
    if as_json:
        names = (first, second, "samples")
        print_json(
            {split: [dict(zip(names, pair, strict=True)) for pair in pairs] for split, pairs in splits.items()}
        )
        return
    for split, pairs in splits.items():
        equal = sum(count for a, b, count in pairs if a == b)
        total = sum(count for _, _, count in pairs)
        print_line(f"{split}: {first} and {second} agree on {equal} of {count_text(total, 'sample')}")
        print_table((first, second, "samples"), [(a or "-", b or "-", count) for a, b, count in pairs])


def removal_line(removal: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the line that says when and why a version was removed; `removal` is the entry of its removal."""
    if removal is None:
        return {}
    why = f" ({removal['message']})" if removal.get("message") else ""
    return {"REMOVED": f"{removal['created']}{why}: only this metadata is left"}


def head(
    ref: SamplesArgument,
    repo: RepoOption,
    num: Annotated[int, typer.Option("-n", min=0, help="Number of samples per split.")] = 10,
    split: SplitOption = None,
    where: WhereOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a contact sheet to this HTML file instead.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the first samples of a data-set version; on a terminal with colours, their images too.

    Example: datasvc head pets@1 -n 3 --split train --repo ./repo

    Images are drawn as pixels by terminals that can (kitty, sixel), else as half blocks. DATASVC_IMAGES=kitty, sixel,
    blocks or none overrides what is detected.
    """
    from rich.console import Console

    from datasvc.cli.terminal.terminal_image import choose_protocol
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset
    from datasvc.shards.query.contact_sheet import preview_samples, write_contact_sheet
    from datasvc.shards.versions.dataset import choose_split

    dataset = open_dataset(Repository.open(repo), ref)
    # A generator, so that the first samples are printed before the last ones are read.
    samples = (sample for chosen in choose_split(dataset, split) for sample in preview_samples(chosen, num, where))
    if html is not None:
        num_written = write_contact_sheet(html, dataset.title, samples)
        if as_json:
            print_json({"file": str(html), "samples": num_written})
        else:
            print_line(f"wrote {count_text(num_written, 'sample')} of {dataset.title} to {html}")
    elif as_json:
        print_json([_sample_facts(sample) for sample in samples])
    else:
        console = Console()
        protocol = choose_protocol(console)
        for sample in samples:
            _print_sample(console, protocol, sample)


def sql(
    ref: SamplesArgument,
    query: QueryArgument,
    repo: RepoOption,
    as_csv: CsvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Query a data-set version with SQL; only the columns that the query uses are read.

    Example: datasvc sql pets@1 "select class, count(*) from train group by class"

    There is one table for each split, a table `samples` with all splits and a column `split`, and a table `classes`
    with `label` and `name`; the column `class` has the class name of each sample. For blobs, their sizes are printed.
    """
    from datasvc.repository import Repository
    from datasvc.shards.query.query import query as run_query

    check_one_format(as_csv=as_csv, as_json=as_json)
    print_query_result(run_query(Repository.open(repo), ref, query), as_csv=as_csv, as_json=as_json)


def _print_split(name: str, split: Mapping[str, Any]) -> None:
    printed_separately = ("classes", "class_counts", "columns", "image_kinds")
    facts = {key: value for key, value in split.items() if key not in printed_separately}
    kinds = ", ".join(f"{count} {kind}" for kind, count in split["image_kinds"].items())
    print_facts({f"split {name}": facts | ({"images": kinds} if kinds else {})})
    print_facts({"  columns": {f"  {column}": kind for column, kind in split["columns"].items()}})
    if split["classes"] or split["class_counts"]:
        sys.stdout.write(f"  classes: {max(len(split['classes']), len(split['class_counts']))}\n")
    for line in histogram_lines(split["class_counts"]):
        sys.stdout.write(f"    {line}\n")


def histogram_lines(counts: Mapping[str, int]) -> list[str]:
    """Return a bar for each of the largest classes, largest first, and one line for all other classes."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown, others = ordered[:_MAX_CLASSES], ordered[_MAX_CLASSES:]
    name_width = max((len(text_value(name)) for name, _ in shown), default=0)
    # The first count is the largest, so it has the most digits.
    digits = len(str(shown[0][1])) if shown else 0
    lines = [
        f"{text_value(name):<{name_width}}  {count:>{digits}} "
        + "\N{FULL BLOCK}" * round(_MAX_BAR_CHARACTERS * count / max(shown[0][1], 1))
        for name, count in shown
    ]
    return lines + ([f"and {len(others)} more: {sum(count for _, count in others)}"] if others else [])


def _sample_facts(sample: Preview) -> dict[str, Any]:
    values = {name: json_value(value) for name, value in sample.values.items()}
    blobs = {name: {"bytes": size} for name, size in sample.blob_bytes.items()}
    return {"split": sample.split, "key": sample.key, "class": sample.class_name, "values": values | blobs}


def _print_sample(console: Console, protocol: ImageProtocol, sample: Preview) -> None:
    facts = {name: short_text_value(value) for name, value in sample.values.items()}
    if sample.class_name is not None:
        facts["class"] = text_value(sample.class_name)
    facts |= {name: f"{size} bytes" for name, size in sample.blob_bytes.items()}
    print_facts({text_value(f"{sample.split}/{sample.key}"): facts})
    if protocol != "none":
        _draw_images(console, protocol, sample)


def _draw_images(console: Console, protocol: ImageProtocol, sample: Preview) -> None:
    from datasvc.cli.terminal.terminal_image import max_side, print_image
    from datasvc.shards.images.thumbnail import thumbnail

    sys.stdout.flush()  # the console has a buffer of its own
    for name, encoded in sample.images.items():
        try:
            print_image(thumbnail(encoded, max_side(protocol, console)), protocol, console)
        except BadSampleError as error:
            console.print(f"  {name}: {text_value(str(error))}", markup=False, highlight=False)
