"""`datasvc delete | classes | diff | merge`: versions of data sets made from versions, and how they differ."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.datasets.ingest import OnSplitOverlap, overlap_facts
from datasvc.cli.datasets.key_file import read_keys, read_lines
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json
from datasvc.cli.terminal.values import text_value

if TYPE_CHECKING:
    from datasvc.shards.versions.diff import SplitDifference

RefArgument = Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION or NAME@TAG.")]
MessageOption = Annotated[str, typer.Option("--message", "-m", help="Kept with the version.")]

_SHOWN_KEYS = 10


class OnCommonAtMerge(StrEnum):
    """What becomes of a key that several versions have."""

    fail = "fail"
    drop = "drop"
    first = "first"
    last = "last"


def delete(
    ref: RefArgument,
    repo: RepoOption,
    keys: Annotated[str | None, typer.Option(metavar="FILE", help="Keys, one a line; - is standard input.")] = None,
    where: Annotated[str | None, typer.Option(metavar="EXPR", help="SQL condition over the columns.")] = None,
    split: Annotated[str | None, typer.Option(help="Look in this split only.")] = None,
    ignore_missing: Annotated[bool, typer.Option(help="Go on where a key is not there.")] = False,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Commit the next version without the samples named; older versions keep them.

    Example: datasvc delete pets --where "label = 3 and width < 100" --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.delete import delete as run_delete

    done = run_delete(
        Repository.open(repo),
        ref,
        keys=None if keys is None else read_keys(keys),
        where=where,
        split=split,
        ignore_missing=ignore_missing,
        message=message,
    )
    if as_json:
        print_json(
            {
                "version": str(done.version),
                "committed": bool(done.num_deleted),
                "deleted": done.deleted,
                "missing": done.missing,
            }
        )
        return
    if done.missing:
        typer.echo(f"{len(done.missing)} keys are not there: {_some(done.missing)}", err=True)
    if not done.num_deleted:
        typer.echo(f"nothing to delete: {done.version} stays the newest version")
        return
    typer.echo(f"committed {done.version}: deleted {_counted(done.deleted)} samples")


def classes(
    ref: RefArgument,
    names: Annotated[str, typer.Argument(metavar="FILE", help="Class names, one a line, that of label 0 first.")],
    repo: RepoOption,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Commit the next version with names for the classes of its integer labels; shards are shared.

    Example: datasvc classes pets names.txt --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.class_names import name_classes

    given = read_lines(names, "class names")
    version = name_classes(Repository.open(repo), ref, given, message=message)
    if as_json:
        print_json({"version": str(version), "classes": given})
    else:
        typer.echo(f"committed {version}: {len(given)} classes have names")


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="NAME, NAME@VERSION or NAME@TAG.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The version to compare with it.")],
    repo: RepoOption,
    keys: Annotated[
        bool, typer.Option("--keys", help=f"List all keys, not only {_SHOWN_KEYS} of each kind.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what leads from version A to version B: samples added, deleted and changed, columns, classes.

    Example: datasvc diff pets@1 pets@2 --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.diff import diff as run_diff

    found = run_diff(Repository.open(repo), a, b)
    shown = None if keys else _SHOWN_KEYS
    if as_json:
        print_json(
            {
                "a": str(found.a),
                "b": str(found.b),
                "splits": {split: _facts(each, shown) for split, each in found.splits.items()},
                "splits_added": list(found.splits_added),
                "splits_removed": list(found.splits_removed),
            }
        )
        return
    print_facts({"from": found.a, "to": found.b})
    for split, each in found.splits.items():
        only = "added " if split in found.splits_added else "removed " if split in found.splits_removed else ""
        print_facts({f"{only}split {split}": _lines(each, shown)})


def merge(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the data set to make.")],
    refs: Annotated[list[str], typer.Argument(metavar="REF...", help="Two versions or more.")],
    repo: RepoOption,
    on_common: Annotated[
        OnCommonAtMerge, typer.Option(help="Keys that several have: see the text above.")
    ] = OnCommonAtMerge.fail,
    on_split_overlap: Annotated[
        OnSplitOverlap,
        typer.Option(
            help="Keys or equal images in two splits: commit nothing, drop them from training, or keep both."
        ),
    ] = OnSplitOverlap.fail,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Commit the samples of several versions as the next version of NAME; shards are shared, not copied.

    Example: datasvc merge animals pets zoo@3 --repo ./repo

    Where several have a key in one split: "fail" commits nothing; "drop" takes equal samples once and fails on
    others; "first" and "last" take the sample of the first or of the last version.
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.merge import merge as run_merge
    from datasvc.sizes import format_size

    done = run_merge(
        Repository.open(repo),
        refs,
        name,
        on_common=on_common.value,
        on_split_overlap=on_split_overlap.value,
        message=message,
    )
    merged = [str(version) for version in done.merged]
    if as_json:
        print_json(
            {
                "version": str(done.version),
                "merged": merged,
                "samples": done.num_samples,
                "shards": done.num_shards,
                "bytes": done.size_bytes,
                "overlaps": [overlap_facts(overlap) for overlap in done.overlaps],
            }
        )
        return
    typer.echo(
        f"committed {done.version} from {', '.join(merged)}: {_counted(done.num_samples)} samples, "
        f"{sum(done.num_shards.values())} shards, {format_size(done.size_bytes)}"
    )
    for overlap in done.overlaps:
        typer.echo(text_value(str(overlap)), err=True)


def _facts(split: SplitDifference, shown: int | None) -> dict[str, Any]:
    kinds = {"added": split.added, "deleted": split.deleted, "changed": split.changed}
    return {
        **{kind: len(keys) for kind, keys in kinds.items()},
        "unchanged": split.unchanged,
        "keys": {kind: list(islice(keys, shown)) for kind, keys in kinds.items()},
        "columns_added": dict(split.columns_added),
        "columns_removed": dict(split.columns_removed),
        "columns_retyped": {name: list(types) for name, types in split.columns_retyped.items()},
        "classes_added": list(split.classes_added),
        "classes_removed": list(split.classes_removed),
    }


def _lines(split: SplitDifference, shown: int | None) -> dict[str, object]:
    """Return what people read: counts with some keys, and what changed of columns and classes, if anything."""
    facts = _facts(split, shown)
    keys = facts.pop("keys")
    lines: dict[str, object] = {}
    for kind in ("added", "deleted", "changed"):
        more = ", ..." if len(keys[kind]) < facts[kind] else ""
        lines[kind] = f"{facts[kind]} ({', '.join(keys[kind])}{more})" if facts[kind] else 0
    lines["unchanged"] = facts["unchanged"]
    rest = {name: value for name, value in facts.items() if name not in lines and value}
    return lines | {name.replace("_", " "): value for name, value in rest.items()}


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in counts.items())


def _some(keys: Iterable[str]) -> str:
    named = list(islice(keys, _SHOWN_KEYS + 1))
    return ", ".join(map(text_value, named[:_SHOWN_KEYS])) + (", ..." if len(named) > _SHOWN_KEYS else "")
