"""`datasvc models trained-on | evaluated`: versions that consumed given samples, and those of their evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.datasets.ingest import chosen_keys
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    JsonOption,
    KeysOption,
    RepoOption,
    SampleOption,
    print_json,
    print_line,
    print_table,
)
from datasvc.errors import ConfigError
from datasvc.printable import count_text

if TYPE_CHECKING:
    from datasvc.models import ConsumerReport, VersionUses

_MAX_SHOWN = 10


@options_from(
    "models.provenance.find_consumers.find_consumers",
    deleted_in=typer.Option(metavar="DATA"),
    changed_in=typer.Option(metavar="DATA"),
    data=typer.Option(metavar="DATA"),
)
def trained_on(
    repo: RepoOption,
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|REF]...", help="Models (all their versions) or versions; default: all models."),
    ] = None,
    sample: SampleOption = None,
    keys: KeysOption = None,
    *,
    show: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Number of samples to print with epoch and step; default {_MAX_SHOWN}, --json: all."
        ),
    ] = None,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Find the model versions that consumed given samples, with epoch and step; resumes and fine-tuning included.

    Example: datasvc models trained-on digits-cnn --deleted-in digits@2 --repo ./repo

    The answer is computed from the recorded access order and positions. A version consumed a sample if its training,
    or the training of a version that it continues, did. Samples read after a run's last checkpoint are in no version.
    """
    from datasvc.models import find_consumers
    from datasvc.repository import Repository

    sample_keys = chosen_keys(sample, keys)
    # Check the options and not the keys, because a file without keys is valid: it requests no sample.
    by_key = options["deleted_in"] is None and options["changed_in"] is None
    if (sample is None and keys is None) == by_key:
        raise ConfigError(
            "give the samples with --sample KEY or --keys FILE, or with --deleted-in DATA or --changed-in DATA alone"
        )
    report = find_consumers(Repository.open(repo), refs or (), keys=sample_keys if by_key else None, **options)
    if as_json:
        print_json(report.to_json(show))
    else:
        _print(report, _MAX_SHOWN if show is None else show)


def _print(report: ConsumerReport, show: int) -> None:
    num_keys = len(report.keys)
    num_consumers = sum(version.num_samples > 0 for version in report.versions)
    print_line(
        f"{num_consumers} of {count_text(len(report.versions), 'version')} consumed some of "
        f"{count_text(num_keys, 'sample')}"
    )
    if len(report.missing):
        names = ", ".join(report.keys[number] for number in report.missing[:_MAX_SHOWN].tolist())
        more = ", ..." if len(report.missing) > _MAX_SHOWN else ""
        print_line(f"{len(report.missing)} are in no data that these versions read: {names}{more}")
    rows = [
        (
            _range_text([version.name for version in group]),
            f"{group[0].num_samples} of {num_keys}",
            sum(version.num_own for version in group),
            "" if group[0].is_complete else "or more: records are incomplete",
        )
        for group in _group_versions(report.versions)
    ]
    print_table(("version", "samples", "in its own training", ""), rows)
    for name, gaps in report.gaps.items():
        for gap in gaps:
            print_line(f"{name}: {gap}")
    for number in range(min(show, num_keys)):
        _print_sample(report, number)
    if show < num_keys and show:
        print_line(f"... and {count_text(num_keys - show, 'more sample')}: --show {num_keys}, or --json")


def _print_sample(report: ConsumerReport, number: int) -> None:
    uses = report.uses(number)
    if not uses:
        return
    print_line(f"{report.keys[number]}:")
    for use in uses:
        step = "step unknown" if use.step is None else f"step {use.step}"
        doubt = "" if use.is_certain else ", unless it was dropped at the end of the epoch"
        print_line(f"  {use.version}: epoch {use.epoch}, {step}, position {use.position} of {use.data}{doubt}")
    print_line(f"  so it is in {', '.join(_range_texts(report.versions_with(number)))}")


def _group_versions(versions: Sequence[VersionUses]) -> Iterator[list[VersionUses]]:
    """Yield consecutive versions of one model with equal counts as one group, for one row of the table."""
    for _, group in groupby(
        versions, key=lambda version: (version.name.partition("@")[0], version.num_samples, version.is_complete)
    ):
        yield list(group)


def _range_text(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _range_texts(names: Sequence[str]) -> Iterator[str]:
    """Yield version names, with consecutive versions of one model as a range: "digits-cnn@3 to digits-cnn@9"."""

    def run_key(indexed: tuple[int, str]) -> tuple[str, int]:
        # Within consecutive versions of a model, the version number minus the index is constant.
        index, name = indexed
        model, _, number = name.partition("@")
        return model, int(number) - index

    for _, group in groupby(enumerate(names), run_key):
        yield _range_text([name for _, name in group])


@options_from(
    "models.provenance.evaluated.find_evaluated",
    data=typer.Option(metavar="DATA@N"),
    split=typer.Option(metavar="SPLIT"),
)
def evaluated(
    ref: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="Model version.")],
    repo: RepoOption,
    *,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Find evaluation samples that a version was trained on, by the content of their images or other blobs.

    Example: datasvc models evaluated digits-cnn@3 --repo ./repo

    Exit status: 0 if the training data has none of them, 1 if it has some.
    """
    from datasvc.models.provenance.evaluated import find_evaluated
    from datasvc.repository import Repository

    found = find_evaluated(Repository.open(repo), ref, **options)
    if as_json:
        print_json(found.to_json())
        raise typer.Exit(1 if found.samples else 0)
    for name, size in found.evaluated.items():
        shared = [sample for sample in found.samples if sample.data == name]
        consumed = sum(sample.is_consumed for sample in shared)
        print_line(
            f"{name}: {len(shared):,} of {count_text(size, 'sample')} are in the training data of {found.version}, "
            f"which was trained on {consumed:,} of them"
        )
    if found.samples:
        print_table(
            ["evaluation", "key", "training", "key there", "trained on"],
            [
                (each.data, each.key, each.trained_data, each.trained_key, "yes" if each.is_consumed else "no")
                for each in found.samples
            ],
        )
    if found.num_unchecked:
        print_line(f"{count_text(found.num_unchecked, 'sample')} without a sample index were not compared")
    for gap in found.gaps:
        print_line(f"or more: {gap}")
    raise typer.Exit(1 if found.samples else 0)
