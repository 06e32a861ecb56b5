"""`datasvc samples | sample | histogram`: find samples of a version, show one, and count values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    JsonOption,
    RepoOption,
    SamplesArgument,
    print_facts,
    print_json,
    print_line,
    print_table,
    short_text_value,
)
from datasvc.printable import count_text, text_value

if TYPE_CHECKING:
    from datasvc.shards.query.sample_page import SamplePage
    from datasvc.shards.query.sample_reader import SampleSummary

_MAX_BAR_CHARACTERS = 40


@options_from(
    "shards.query.sample_page.read_page",
    count=None,
    order=typer.Option(metavar="TERMS"),
    start=typer.Option(min=0),
    max_shards=typer.Option(min=1),
)
def samples(
    ref: SamplesArgument,
    repo: RepoOption,
    *,
    num: Annotated[int, typer.Option("-n", min=1, help="Number of samples.")] = 100,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """List a page of samples with their values and the sizes of their blobs, which are not read.

    Example: datasvc samples pets@1 --where "width < 100" -n 20 --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.query.sample_page import read_page

    page = read_page(Repository.open(repo), ref, count=num, **options)
    if as_json:
        print_json(page.to_json())
        return
    rows = [(sample.number, sample.key, sample.class_name or "-", _values_text(sample)) for sample in page.samples]
    print_table(("number", "key", "class", "values"), rows)
    print_line(_searched_text(page), err=True)


@options_from("shards.query.sample_details.read_sample", max_shards=typer.Option(min=1))
def sample(
    ref: SamplesArgument,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the sample.")],
    repo: RepoOption,
    *,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Show one sample with all its columns, where it is stored, and its duplicates.

    Example: datasvc sample pets@1 cat/1.jpg --repo ./repo

    `datasvc models trained-on --sample KEY` finds the models that were trained on it.
    """
    from datasvc.repository import Repository
    from datasvc.shards.query.sample_details import read_sample

    found = read_sample(Repository.open(repo), ref, key, **options)
    if as_json:
        print_json(found.to_json())
        return
    facts = found.to_json()
    duplicates = facts.pop("duplicates")["samples"]
    print_facts(facts)
    for other in duplicates:
        print_line(f"duplicate: {other['split']} {other['number']} {text_value(other['key'])}")


@options_from("shards.query.histogram.histogram", bins=typer.Option(min=1, max=1000), max_shards=typer.Option(min=1))
def histogram(
    ref: SamplesArgument,
    column: Annotated[
        str, typer.Argument(metavar="COLUMN", help="Column, or SQL expression such as 'width / height'.")
    ],
    repo: RepoOption,
    *,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Count the values of a column: numbers in bins, classes and texts by frequency, blobs by size.

    Example: datasvc histogram pets@1 width --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.query.histogram import histogram as run_histogram

    counted = run_histogram(Repository.open(repo), ref, column, **options)
    if as_json:
        print_json(counted.to_json())
        return
    largest = max((bar.count for bar in counted.bins), default=0) or 1
    rows: list[tuple[Any, ...]] = [
        (bar.label, bar.count, "\N{FULL BLOCK}" * round(_MAX_BAR_CHARACTERS * bar.count / largest))
        for bar in counted.bins
    ]
    print_table((column, "samples", ""), rows)
    for name, count in (("other values", counted.other), ("without a value", counted.null)):
        if count:
            print_line(f"{name}: {count}", err=True)
    print_line(
        f"{count_text(counted.num_samples, 'sample')} from {counted.read_shards} of "
        f"{count_text(counted.num_shards, 'shard')}",
        err=True,
    )


def _values_text(sample: SampleSummary) -> str:
    blobs = {name: f"{size} bytes" for name, size in sample.blob_bytes.items()}
    return ", ".join(f"{name}={short_text_value(value)}" for name, value in {**sample.values, **blobs}.items())


def _searched_text(page: SamplePage) -> str:
    """Return what was searched, and how to see the next page."""
    searched = f"{page.searched_shards} of {count_text(page.num_shards, 'shard')} searched"
    more = f"; continue with --start {page.next_start}" if page.next_start is not None else ""
    return f"{page.version}/{page.split} has {count_text(page.num_samples, 'sample')}; {searched}{more}"
