"""`datasvc models compare`: a table of the values in which several model versions differ."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.output import (
    CsvOption,
    JsonOption,
    RepoOption,
    check_one_format,
    print_csv,
    print_json,
    print_line,
    print_table,
)
from datasvc.printable import text_value


def compare(
    refs: Annotated[list[str], reference("NAME, NAME@VERSION, NAME@TAG or NAME@best:METRIC; two or more.", "REF...")],
    repo: RepoOption,
    equal: Annotated[bool, typer.Option("--all", help="Also print the values that are the same everywhere.")] = False,
    as_csv: CsvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show in a table in which configuration, metrics, data and code several model versions differ.

    Example: datasvc models compare digits-cnn@1 digits-cnn@2 digits-cnn@prod --repo ./repo

    Each version is a column. `datasvc models diff` compares two versions with their tensors.
    """
    from datasvc.models.registry.compare import compare_versions
    from datasvc.repository import Repository

    check_one_format(as_csv=as_csv, as_json=as_json)
    result = compare_versions(Repository.open(repo), refs, equal=equal)
    if as_json:
        print_json(asdict(result))
        return
    columns = ("value", *result.versions)
    if as_csv:
        rows = [(row.name, *(row.values.get(version) for version in result.versions)) for row in result.values]
        print_csv(columns, rows)
        return
    print_table(
        columns,
        [
            (row.name, *(text_value(row.values.get(version, "-")) for version in result.versions))
            for row in result.values
        ],
    )
    if not result.values and len(result.versions) > 1:
        print_line(f"no difference between {', '.join(result.versions)}", err=True)
