"""Print results of SQL queries as a table, CSV or JSON."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.output import print_json, print_table
from datasvc.errors import ConfigError
from datasvc.printable import json_value, text_value

if TYPE_CHECKING:
    import pyarrow as pa

QueryArgument = Annotated[str, typer.Argument(metavar="QUERY", help="One SQL query in the dialect of DuckDB.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")]


def check_one_format(*, as_csv: bool, as_json: bool) -> None:
    """Raise ConfigError if both formats are requested."""
    if as_csv and as_json:
        raise ConfigError("--csv and --json exclude each other; give one of them")


def print_query_result(result: pa.Table, *, as_csv: bool, as_json: bool) -> None:
    """Print the rows of the result in the requested format; as a table if no format is requested."""
    # Do not use `result.to_pylist()`: it returns a dict per row, which cannot hold two columns of the same name.
    columns = [column.to_pylist() for column in result.columns]
    rows = list(zip(*columns, strict=True))
    if as_json:
        names = _unique_names(result.column_names)
        print_json([dict(zip(names, map(json_value, row), strict=True)) for row in rows])
    elif as_csv:
        print_csv(result.column_names, rows)
    else:
        print_table(result.column_names, [tuple(map(text_value, row)) for row in rows])


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as CSV with a header; None is an empty field."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_value(value) for value in row] for row in rows)


def _unique_names(names: list[str]) -> list[str]:
    """Return different names for all columns, as keys of JSON objects: `a`, `a` become `a`, `a_1`."""
    unique: list[str] = []
    for name in names:
        candidate, number = name, 0
        # A name with a number must not equal any other column's name, not even a later one.
        while candidate in unique or (candidate != name and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def _csv_value(value: Any) -> Any:
    """Return a value of one CSV field; nested values and bytes become text."""
    plain = json_value(value)  # a dict for bytes too
    return text_value(value) if isinstance(plain, (dict, list)) else plain
