"""`datasvc models diff`: what is different between two model versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.models.registry.diff import ModelDifference, TensorChange, TensorsDifference, ValueChanges
    from datasvc.models.tensors.tensor_table import TensorRecord

_SHOWN = 20


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="NAME, NAME@VERSION or NAME@TAG.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The version to compare with it.")],
    repo: RepoOption,
    norms: Annotated[bool, typer.Option(help="Read tensors that differ, and say by how much.")] = True,
    all_tensors: Annotated[bool, typer.Option("--all", help=f"List all tensors, not only {_SHOWN}.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what leads from model version A to B: data, code, configuration, metrics, and tensors.

    Example: datasvc models diff digits-cnn@3 digits-cnn@prod --repo ./repo
    """
    from datasvc.models.registry.diff import diff as run_diff
    from datasvc.repository import Repository

    with byte_progress("comparing") as (set_total, advance):
        found = run_diff(Repository.open(repo), a, b, norms=norms, begin=set_total, report=advance)
    if as_json:
        print_json(_facts(found))
        return
    print_facts({"from": found.a, "to": found.b, "step": _moved(*found.steps)})
    for part, changes in found.values.items():
        print_facts({part: _lines(changes) if changes else "no difference"})
    _print_tensors(found.tensors, None if all_tensors else _SHOWN)


def _facts(found: ModelDifference) -> dict[str, Any]:
    tensors = found.tensors
    return {
        "a": str(found.a),
        "b": str(found.b),
        "steps": list(found.steps),
        **{part: asdict(changes) for part, changes in found.values.items()},
        "tensors": {
            "added": [_tensor(record) for record in tensors.added],
            "removed": [_tensor(record) for record in tensors.removed],
            "retyped": [{"name": old.name, "from": _tensor(old), "to": _tensor(new)} for old, new in tensors.retyped],
            "changed": list(tensors.changed),
            "changes": [asdict(change) for change in tensors.changes],
            "equal": tensors.num_equal,
        },
    }


def _tensor(record: TensorRecord) -> dict[str, Any]:
    return {"name": record.name, "dtype": record.dtype, "shape": list(record.shape)}


def _lines(changes: ValueChanges) -> dict[str, object]:
    return {
        **{f"+ {path}": value for path, value in changes.added.items()},
        **{f"- {path}": value for path, value in changes.removed.items()},
        **{f"~ {path}": _moved(*values) for path, values in changes.changed.items()},
    }


def _moved(old: Any, new: Any) -> str:
    if old == new:
        return str(old)
    number = isinstance(old, int | float) and isinstance(new, int | float)
    return f"{old} -> {new}" + (f" ({new - old:+.4g})" if number and not isinstance(old, bool) else "")


def _print_tensors(tensors: TensorsDifference, shown: int | None) -> None:
    print_facts(
        {
            "tensors": f"{tensors.num_equal} equal, {len(tensors.changed)} changed, {len(tensors.added)} added, "
            f"{len(tensors.removed)} removed, {len(tensors.retyped)} of another dtype or shape"
        }
    )
    _print_some("added", [_described(record) for record in tensors.added], shown)
    _print_some("removed", [_described(record) for record in tensors.removed], shown)
    retyped = [f"{old.name}: {_kind(old)} -> {_kind(new)}" for old, new in tensors.retyped]
    _print_some("retyped", retyped, shown)
    by_size = sorted(tensors.changes, key=lambda change: -(change.relative or 0.0))
    _print_some("changed", list(map(_change_line, by_size)) or list(tensors.changed), shown)


def _print_some(title: str, lines: list[str], shown: int | None) -> None:
    for line in islice(lines, shown):
        typer.echo(f"  {title} {line}")
    if shown is not None and len(lines) > shown:
        typer.echo(f"  {len(lines) - shown} more {title}: --all lists them")


def _described(record: TensorRecord) -> str:
    return f"{record.name}: {_kind(record)}"


def _kind(record: TensorRecord) -> str:
    return f"{record.dtype}[{_joined(record.shape)}]"


def _joined(shape: Iterable[int]) -> str:
    return ", ".join(map(str, shape))


def _change_line(change: TensorChange) -> str:
    relative = "" if change.relative is None else f", {change.relative:.3g} of its norm"
    bad = f", {change.num_nonfinite} differences NOT FINITE" if change.num_nonfinite else ""
    return (
        f"{change.name}: by {change.norm:.4g}{relative}, {change.num_changed} of {change.num_elements} elements{bad}"
    )
