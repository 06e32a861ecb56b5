"""`datasvc delete | classes | diff | combine | revert`: derive data-set versions from others, and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.datasets.ingest import format_counts, overlap_facts, print_conflicts, read_keys, read_lines
from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    DoneOption,
    JsonOption,
    KeysOption,
    MessageOption,
    RefArgument,
    RepoOption,
    check_one_of,
    print_facts,
    print_json,
    print_line,
    print_result,
)
from datasvc.errors import ConfigError
from datasvc.printable import count_text, text_value
from datasvc.progress import byte_progress
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from datasvc.shards.versions.delete import DeleteReport
    from datasvc.shards.versions.diff import SplitDifference
    from datasvc.shards.versions.merge import MergeReport

_MAX_KEYS = 10  # keys of each kind that are listed


@options_from(
    "shards.versions.delete.delete",
    in_order="ref repo keys where split damaged ignore_missing yes dry_run message as_json",
    ignore_missing=typer.Option(),
)
def delete(
    ref: RefArgument,
    repo: RepoOption,
    keys: KeysOption = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Delete the samples whose bytes are lost; reads every byte.")
    ] = False,
    yes: DoneOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the samples, and delete nothing.")] = False,
    message: MessageOption = "",
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Commit the next version without the given samples; older versions still have them.

    Example: datasvc delete pets --where "label = 3 and width < 100" --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.history.repair import delete_damaged
    from datasvc.shards.versions.delete import delete as run_delete

    check_one_of(yes=yes, dry_run=dry_run)
    repository = Repository.open(repo)
    if damaged:
        if keys is not None or not {*options.values()} <= {None, False}:
            raise ConfigError(
                "--damaged selects the samples; leave out --keys, --where, --split and --ignore-missing"
            )
        with byte_progress(f"reading {ref}") as progress:
            report = delete_damaged(repository, ref, dry_run=dry_run, message=message, progress=progress)
    else:
        chosen = None if keys is None else read_keys(keys)
        report = run_delete(repository, ref, keys=chosen, dry_run=dry_run, message=message, **options)
    if as_json:
        print_json(
            {
                "version": str(report.version),
                "committed": bool(report.deleted) and not dry_run,
                "deleted": report.deleted,
                "missing": report.missing,
            }
        )
        return
    _print_deleted(report, dry_run=dry_run)


def _print_deleted(report: DeleteReport, *, dry_run: bool) -> None:
    if report.missing:
        first_missing = [text_value(key) for key in report.missing[:_MAX_KEYS]]
        print_line(
            f"{count_text(len(report.missing), 'missing key')}: {_list_keys(first_missing, len(report.missing))}",
            err=True,
        )
    # A damaged version may lose no sample, only a sample index, and is committed all the same.
    if not report.deleted:
        print_line(f"nothing to delete: {report.version} stays the newest version")
    elif dry_run:
        print_line(f"would delete {format_counts(report.deleted)} samples of {report.version}; nothing was committed")
    else:
        print_line(f"committed {report.version}: deleted {format_counts(report.deleted)} samples")


def classes(
    ref: RefArgument,
    names: Annotated[str, typer.Argument(metavar="FILE", help="File of class names, one per line, label 0 first.")],
    repo: RepoOption,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Commit the next version with class names for its integer labels; no shard is copied.

    Example: datasvc classes pets names.txt --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.history.rename import name_classes

    class_names = read_lines(names, "class names")
    version = name_classes(Repository.open(repo), ref, class_names, message=message)
    line = f"committed {version}: {count_text(len(class_names), 'class has a name', 'classes have names')}"
    print_result({"version": str(version), "classes": class_names}, line, as_json=as_json)


def diff(
    a: Annotated[str, reference("NAME, NAME@VERSION or NAME@TAG.", "A")],
    b: Annotated[str, reference("Version to compare with A.", "B")],
    repo: RepoOption,
    keys: Annotated[
        bool, typer.Option("--keys", help=f"List all keys, instead of the first {_MAX_KEYS} of each kind.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the changes from version A to version B: samples added, deleted and changed, columns, classes.

    Example: datasvc diff pets@1 pets@2 --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.diff import diff as run_diff

    result = run_diff(Repository.open(repo), a, b)
    max_keys = None if keys else _MAX_KEYS
    if as_json:
        print_json(result.to_json(max_keys))
        return
    print_facts({"from": result.a, "to": result.b})
    for split, changes in result.splits.items():
        prefix = "added " if split in result.splits_added else "removed " if split in result.splits_removed else ""
        print_facts({f"{prefix}split {split}": _lines(changes, max_keys)})


@options_from(
    "shards.versions.merge.merge",
    in_order="name refs repo on_common on_split_overlap key_prefix message as_json",
    on_common=typer.Option(help="If several versions have the same key: the choices are described above."),
)
def combine(
    name: Annotated[str, reference("Data set to commit to, created if missing; or NAME@BRANCH.", "NAME")],
    refs: Annotated[list[str], reference("Two or more versions.", "REF...")],
    repo: RepoOption,
    key_prefix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REF=PREFIX",
            help="Put PREFIX before each key of version REF, whose shards are copied; may be given several times.",
        ),
    ] = None,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Combine all samples of several versions as the next version of NAME.

    Example: datasvc combine animals pets zoo@3 --repo ./repo

    If several versions have a key in the same split: "fail" commits nothing; "drop" keeps one of equal samples and
    fails if they differ; "first" and "last" keep the sample of the first or of the last version. `merge` is for the
    changes of a branch.
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.merge import merge as run_merge

    prefixes = _parse_prefixes(key_prefix or [])
    report = run_merge(Repository.open(repo), refs, name, key_prefixes=prefixes, **options)
    _print_merged(report, as_json=as_json)


def _print_merged(report: MergeReport, *, as_json: bool) -> None:
    merged = [str(version) for version in report.merged]
    if as_json:
        print_json(
            {
                "version": str(report.version),
                "merged": merged,
                "samples": report.num_samples,
                "shards": report.num_shards,
                "bytes": report.size_bytes,
                "overlaps": [overlap_facts(overlap) for overlap in report.overlaps],
                "label_conflicts": [conflict._asdict() for conflict in report.label_conflicts],
            }
        )
        return
    print_line(
        f"committed {report.version} from {', '.join(merged)}: {format_counts(report.num_samples)} samples, "
        f"{count_text(sum(report.num_shards.values()), 'shard')}, {format_size(report.size_bytes)}"
    )
    for overlap in report.overlaps:
        print_line(str(overlap), err=True)
    print_conflicts(report.label_conflicts)


def _parse_prefixes(texts: Sequence[str]) -> dict[str, str]:
    prefixes = {}
    for text in texts:
        ref, equals, prefix = text.partition("=")
        if not equals or not prefix or ref in prefixes:
            raise ConfigError(
                f"--key-prefix {text!r}: expected REF=PREFIX, once for each version and not empty, such as zoo@3=zoo/"
            )
        prefixes[ref] = prefix
    return prefixes


@options_from("shards.history.revert.revert")
def revert(
    ref: Annotated[str, reference("The old version: NAME@VERSION or NAME@TAG.")],
    repo: RepoOption,
    *,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Commit the next version with the samples of an old one; no data is copied, and the versions between them stay.

    Example: datasvc revert pets@2 --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.history.revert import revert as run_revert

    report = run_revert(Repository.open(repo), ref, **options)
    facts = {"version": str(report.version), "equal_to": str(report.equal_to), "committed": report.is_new}
    line = (
        f"committed {report.version}: it has the samples of {report.equal_to}"
        if report.is_new
        else f"nothing to revert: {report.version} has the samples of {report.equal_to} already"
    )
    print_result(facts, line, as_json=as_json)


def _lines(split: SplitDifference, max_keys: int | None) -> dict[str, object]:
    """Return the differences as lines to print: counts with at most `max_keys` keys, then columns and classes."""
    from datasvc.views.diffs import schema_changes

    facts = split.to_json(max_keys)
    keys, counts, distance = facts["keys"], facts["class_counts"], facts["class_distance"]
    lines: dict[str, object] = {}
    for kind in ("added", "deleted", "changed"):
        lines[kind] = f"{facts[kind]} ({_list_keys(keys[kind], facts[kind])})" if facts[kind] else 0
    if facts["relabelled"]:
        labels = [f"{each['key']} {each['old'] or '-'} to {each['new'] or '-'}" for each in facts["labels"]]
        lines["relabelled"] = f"{facts['relabelled']} ({_list_keys(labels, facts['relabelled'])})"
    lines |= {"unchanged": facts["unchanged"], **schema_changes(facts)}
    if distance:
        largest = sorted(counts.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:_MAX_KEYS]
        texts = [f"{name} {first} to {second}" for name, (first, second) in largest]
        lines["drift of classes"] = f"{distance:.4g} ({_list_keys(texts, len(counts))})"
    return lines


def _list_keys(keys: Sequence[str], count: int) -> str:
    """Return `keys` as text, with "..." if they are fewer than `count`, the number of all keys."""
    return ", ".join([*keys, *(["..."] if len(keys) < count else [])])
