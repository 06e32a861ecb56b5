"""`datasvc models trained-on`: which versions consumed given samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.datasets.key_file import read_keys
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_table
from datasvc.cli.terminal.values import text_value
from datasvc.errors import ConfigError

if TYPE_CHECKING:
    from datasvc.models import ConsumerReport, SampleUse, VersionUses

_SHOWN: int = 10


def trained_on(
    repo: RepoOption,
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|REF]...", help="Models, with all their versions, or versions; default: all."),
    ] = None,
    sample: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Key of a sample; may be repeated.")] = None,
    keys: Annotated[str | None, typer.Option(metavar="FILE", help="Keys, one a line; - is standard input.")] = None,
    deleted_in: Annotated[
        str | None, typer.Option(metavar="DATA", help="The samples that this version of a data set deleted.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Keys count in this data set, or version of it, only.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Keys count in splits of this name only.")] = None,
    show: Annotated[
        int | None, typer.Option(min=0, help=f"Say when of so many samples; default {_SHOWN}, with --json all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which model versions consumed samples, in which epoch and step, resumes and fine-tuning included.

    Example: datasvc models trained-on digits-cnn --deleted-in digits@2 --repo ./repo

    Computed from the recorded order and positions. A sample counts for a version if its own training consumed it, or
    that of a version that it continues. What was served after a run's last checkpoint is in no version.
    """
    from datasvc.models import find_consumers
    from datasvc.repository import Repository

    wanted = [*(sample or []), *(read_keys(keys) if keys is not None else [])]
    if (sample is None and keys is None) == (deleted_in is None):
        raise ConfigError("say which samples: --sample KEY, --keys FILE, or --deleted-in DATA, which stands alone")
    found = find_consumers(
        Repository.open(repo),
        refs or (),
        keys=wanted if deleted_in is None else None,
        deleted_in=deleted_in,
        data=data,
        split=split,
    )
    if as_json:
        print_json(_facts(found, len(found.keys) if show is None else show))
    else:
        _print(found, _SHOWN if show is None else show)


def _facts(found: ConsumerReport, show: int) -> dict[str, Any]:
    shown = found.all_uses() if show >= len(found.keys) else _first_sightings(found, show)
    return {
        "samples": len(found.keys),
        "missing": [found.keys[number] for number in found.missing.tolist()],
        "versions": [
            {"version": each.name, "samples": each.num_samples, "own": each.num_own, "complete": each.is_complete}
            for each in found.versions
        ],
        "gaps": {name: list(gaps) for name, gaps in found.gaps.items()},
        "consumed": [each._asdict() for each in shown],
    }


def _print(found: ConsumerReport, show: int) -> None:
    num_keys = len(found.keys)
    num_saw = sum(each.num_samples > 0 for each in found.versions)
    _say(f"{num_saw} of {len(found.versions)} versions consumed some of {num_keys} samples")
    if len(found.missing):
        named = ", ".join(found.keys[number] for number in found.missing[:_SHOWN].tolist())
        more = ", ..." if len(found.missing) > _SHOWN else ""
        _say(f"{len(found.missing)} are in no data that these versions read: {named}{more}")
    rows = [
        (_range(group), f"{group[0].num_samples} of {num_keys}", sum(each.num_own for each in group), _mark(group[0]))
        for group in _alike(found.versions)
    ]
    print_table(("version", "samples", "in its own training", ""), rows)
    for name, gaps in found.gaps.items():
        for gap in gaps:
            _say(f"{name}: {gap}")
    for number in range(min(show, num_keys)):
        _print_sample(found, number)
    if show < num_keys and show:
        _say(f"... and {num_keys - show} more samples: --show {num_keys}, or --json")


def _print_sample(found: ConsumerReport, number: int) -> None:
    sightings = found.uses(number)
    if not sightings:
        return
    _say(f"{found.keys[number]}:")
    for each in sightings:
        step = "step unknown" if each.step is None else f"step {each.step}"
        doubt = "" if each.is_certain else ", unless it was dropped at the end of the epoch"
        _say(f"  {each.version}: epoch {each.epoch}, {step}, position {each.position} of {each.data}{doubt}")
    _say(f"  so it is in {', '.join(_ranges(found.versions_with(number)))}")


def _first_sightings(found: ConsumerReport, show: int) -> Iterator[SampleUse]:
    return (each for number in range(show) for each in found.uses(number))


def _alike(versions: Sequence[VersionUses]) -> Iterator[list[VersionUses]]:
    """Yield neighbours of one model that a table need not tell apart."""
    for _, group in groupby(versions, key=lambda each: (_model(each.name), each.num_samples, each.is_complete)):
        yield list(group)


def _range(group: Sequence[VersionUses]) -> str:
    return group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}"


def _ranges(names: Sequence[str]) -> Iterator[str]:
    """Yield names of versions, neighbours of one model as one: "digits-cnn@3 to digits-cnn@9"."""
    places = [(_model(name), int(name.rpartition("@")[2]) - number) for number, name in enumerate(names)]
    start = 0
    for _, group in groupby(places):
        stop = start + sum(1 for _ in group)
        yield names[start] if stop - start == 1 else f"{names[start]} to {names[stop - 1]}"
        start = stop


def _mark(version: VersionUses) -> str:
    return "" if version.is_complete else "or more: not all is known"


def _model(name: str) -> str:
    return name.partition("@")[0]


def _say(line: str) -> None:
    typer.echo(text_value(line))
