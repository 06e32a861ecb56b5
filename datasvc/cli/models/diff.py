"""`datasvc models diff`: show the differences between two model versions."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json, print_line
from datasvc.printable import count_text
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.models.registry.diff import TensorChange, TensorsDifference, ValueChanges
    from datasvc.models.tensors.tensor_table import TensorRecord

_MAX_TENSORS = 20


def diff(
    a: Annotated[str, reference("NAME, NAME@VERSION or NAME@TAG.", "A")],
    b: Annotated[str, reference("Version to compare with A.", "B")],
    repo: RepoOption,
    norms: Annotated[
        bool, typer.Option(help="Read the tensors that differ, and print the norm of each difference.")
    ] = True,
    all_tensors: Annotated[
        bool, typer.Option("--all", help=f"List all tensors, instead of the first {_MAX_TENSORS}.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the changes from model version A to B: data, code, configuration, metrics, and tensors.

    Example: datasvc models diff digits-cnn@3 digits-cnn@prod --repo ./repo
    """
    from datasvc.models.registry.diff import diff as run_diff
    from datasvc.repository import Repository

    with byte_progress("comparing") as progress:
        result = run_diff(Repository.open(repo), a, b, norms=norms, progress=progress)
    if as_json:
        print_json(result.to_dict())
        return
    print_facts({"from": result.a, "to": result.b, "step": _value_change(*result.steps)})
    for part, changes in result.values.items():
        print_facts({part: _change_lines(changes) if changes else "no difference"})
    _print_tensors(result.tensors, None if all_tensors else _MAX_TENSORS)


def _change_lines(changes: ValueChanges) -> dict[str, object]:
    return {
        **{f"+ {path}": value for path, value in changes.added.items()},
        **{f"- {path}": value for path, value in changes.removed.items()},
        **{f"~ {path}": _value_change(*values) for path, values in changes.changed.items()},
    }


def _value_change(old: Any, new: Any) -> str:
    if old == new:
        return str(old)
    # A boolean is an integer in Python, but the difference of two booleans has no meaning.
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new))
    return f"{old} -> {new}" + (f" ({new - old:+.4g})" if are_numbers else "")


def _print_tensors(tensors: TensorsDifference, max_lines: int | None) -> None:
    print_facts(
        {
            "tensors": f"{tensors.num_equal} equal, {len(tensors.changed)} changed, {len(tensors.added)} added, "
            f"{len(tensors.removed)} removed, {len(tensors.retyped)} of another dtype or shape"
        }
    )
    _print_first("added", [_tensor_line(record) for record in tensors.added], max_lines)
    _print_first("removed", [_tensor_line(record) for record in tensors.removed], max_lines)
    retyped = [f"{old.name}: {_tensor_type(old)} -> {_tensor_type(new)}" for old, new in tensors.retyped]
    _print_first("retyped", retyped, max_lines)
    largest_first = sorted(tensors.changes, key=lambda change: -(change.relative or 0.0))
    _print_first("changed", list(map(_change_line, largest_first)) or list(tensors.changed), max_lines)


def _print_first(title: str, lines: list[str], max_lines: int | None) -> None:
    for line in islice(lines, max_lines):
        print_line(f"  {title} {line}")
    if max_lines is not None and len(lines) > max_lines:
        print_line(f"  {len(lines) - max_lines} more {title}: --all lists them")


def _tensor_line(record: TensorRecord) -> str:
    return f"{record.name}: {_tensor_type(record)}"


def _tensor_type(record: TensorRecord) -> str:
    return f"{record.dtype}[{', '.join(map(str, record.shape))}]"


def _change_line(change: TensorChange) -> str:
    relative = "" if change.relative is None else f", {change.relative:.3g} of its norm"
    bad = f", {change.num_nonfinite} differences NOT FINITE" if change.num_nonfinite else ""
    return (
        f"{change.name}: by {change.norm:.4g}{relative}, {change.num_changed} of "
        f"{count_text(change.num_elements, 'element')}{bad}"
    )
