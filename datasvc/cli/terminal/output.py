"""Options that many commands have, and the output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

from datasvc.cli.terminal.completion import reference
from datasvc.errors import ConfigError, CorruptDataError, UnreadableVersionWarning
from datasvc.printable import count_text, escape_controls, json_value, text_value

# rich is imported on first use: most output is plain lines, and `show` imports little.
if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table
    from rich.text import Text

    from datasvc.drawing import VersionNode


RepoOption = Annotated[
    str, typer.Option("--repo", envvar="DATASVC_REPO", help="Repository: a folder or any fsspec URL.")
]
RefArgument = Annotated[str, reference("NAME, NAME@VERSION or NAME@TAG; a data set: also NAME@BRANCH.")]
SamplesArgument = Annotated[
    str, reference("NAME, NAME@VERSION or NAME@TAG; REF[CONDITION] or REF[VIEW] for a part of its samples.")
]
SplitOption = Annotated[str | None, typer.Option(help="Only this split; default: all splits.")]
WhereOption = Annotated[
    str | None,
    typer.Option(metavar="EXPR", help="SQL condition over the columns, such as \"class = 'cat' and width < 100\"."),
]
SampleOption = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="Key of a sample; may be given several times.")
]
KeysOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="File of sample keys, one per line; - is standard input.")
]
MessageOption = Annotated[str, typer.Option("--message", "-m", help="Description stored with the version.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do it. Without --yes, only print what would be removed.")]
DoneOption = Annotated[bool, typer.Option("--yes", help="Do it; also without --yes.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


LastOption = Annotated[int | None, typer.Option(min=1, help="Only this number of the newest versions.")]
SvgOption = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Write the graph of the versions to this SVG file.")
]


EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as in shells
_SHOWN_ITEMS: Final = 8  # of a list in a sample

_left_out: ContextVar[dict[str, UnreadableVersionWarning] | None] = ContextVar("unreadable versions", default=None)
QueryArgument = Annotated[str, typer.Argument(metavar="QUERY", help="One SQL query in the dialect of DuckDB.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")]


def check_one_of(*, yes: bool, dry_run: bool) -> None:
    """Raise ConfigError if both `--yes` and `--dry-run` are given."""
    if yes and dry_run:
        raise ConfigError("--yes does it and --dry-run only shows it; give one of them")


@contextmanager
def resumable() -> Iterator[None]:
    """End a command that can be continued with one line and status 130 if Ctrl-C interrupts it."""
    try:
        yield
    except KeyboardInterrupt:
        print_line("interrupted; the same command continues where this one stopped", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=not _is_unicode(sys.stdout)) + "\n")


def print_result(value: Any, line: str, *, as_json: bool) -> None:
    """Print the result of a command: `value` as JSON, or a line of text."""
    if as_json:
        print_json(value)
    else:
        print_line(line)


def print_json_line(value: Any) -> None:
    """Print one JSON document as a single line and flush it. Commands that print events while they run use this."""
    sys.stdout.write(json.dumps(value, sort_keys=True, ensure_ascii=not _is_unicode(sys.stdout)) + "\n")
    sys.stdout.flush()


def _is_unicode(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().startswith("utf")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on a terminal; elsewhere, one line for the columns and one per row, with tabs between values."""
    if not sys.stdout.isatty():
        # For programs such as cut and awk.
        for row in (columns, *rows):
            sys.stdout.write("\t".join(text_value(str(value)) for value in row) + "\n")
        return
    from rich.console import Console

    Console().print(_table(columns, rows))


def print_line(line: str, *, err: bool = False) -> None:
    """Print one line, with control characters escaped, on standard output, or with `err` on standard error."""
    # Not by `typer.echo`, which writes UTF-8 to a stream that takes ASCII.
    stream = sys.stderr if err else sys.stdout
    stream.write(text_value(line) + "\n")
    stream.flush()


def plain_text(value: object) -> Text:
    """Return a value as literal text for rich: brackets are no markup, and control characters are escaped."""
    from rich.text import Text

    return Text(text_value(str(value)))


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in columns:
        # Fold: a long word, such as a URL, continues on the next line; by default its end is lost.
        table.add_column(plain_text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(plain_text, row))
    return table


def print_facts(facts: Mapping[str, object]) -> None:
    """Print `name: value` lines; a value that is a mapping becomes a `name:` line and indented lines."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            sys.stdout.write(f"{text_value(str(name))}:\n")
            for key, nested_value in value.items():
                sys.stdout.write(f"  {text_value(str(key))}: {text_value(nested_value)}\n")
        else:
            sys.stdout.write(f"{text_value(str(name))}: {text_value(value)}\n")


def short_text_value(value: Any) -> str:
    """Return a sample's value as one line of text as `text_value` does, with only the first values of long lists."""
    return escape_controls(_shortened(value))


def _shortened(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(_shortened, value[:_SHOWN_ITEMS]))
        return f"[{shown}, ... {len(value)} values]" if len(value) > _SHOWN_ITEMS else f"[{shown}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_shortened(item)}" for name, item in value.items()) + "}"
    plain = json_value(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def write_output_file(path: Path, content: bytes) -> None:
    """Write a file, which replaces an old one when it is complete.

    Raises:
        NotFoundError: the folder of `path` does not exist.
        ConfigError, UnavailableError: the file cannot be written.
    """
    from datasvc import durable
    from datasvc.errors import NotFoundError
    from datasvc.repository.store.retries import map_exceptions

    if not path.parent.is_dir():
        raise NotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    with map_exceptions("write", str(path)):
        durable.write_file(path, content)


def write_version_graph(path: Path, nodes: Sequence[VersionNode], name: str) -> None:
    """Write the graph of all `nodes` to an SVG file, which replaces an old file, and say so on standard error.

    Raises:
        NotFoundError: the folder of `path` does not exist.
        ConfigError, UnavailableError: the file cannot be written.
    """
    from datasvc.drawing import standalone, version_graph

    drawing = standalone(version_graph(nodes, limit=len(nodes), title=f"versions of {name}"))
    write_output_file(path, drawing.encode())
    print_line(f"wrote {count_text(len(nodes), 'version')} to {path}", err=True)


# The library issues an `UnreadableVersionWarning` for each. A command prints it as a line, ends with status 3, and
# adds the version to its list of versions in JSON.


@contextmanager
def report_unreadable() -> Iterator[None]:
    """Print each version that the command leaves out, once, on standard error.

    A command that left out a version and has no other error ends with status 3.
    """
    left_out: dict[str, UnreadableVersionWarning] = {}  # by version

    def show(  # with the parameters of `warnings.showwarning`
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is UserWarning:  # of the library to its user: the place in its code says nothing
            sys.stderr.write(f"warning: {text_value(str(message))}\n")
        elif not isinstance(message, UnreadableVersionWarning):
            show_other(message, category, filename, lineno, file, line)
        elif message.version not in left_out:
            left_out[message.version] = message
            sys.stderr.write(f"warning: {text_value(str(message))}\n")

    token = _left_out.set(left_out)
    try:
        with warnings.catch_warnings():
            # By default, Python shows a warning only once per text and place in the code.
            warnings.simplefilter("always", UnreadableVersionWarning)
            show_other, warnings.showwarning = warnings.showwarning, show
            yield
    except SystemExit as end:
        # Typer ends each command with SystemExit, even a command that succeeds.
        if left_out and end.code in {None, 0}:
            sys.exit(CorruptDataError.exit_code)
        raise
    finally:
        _left_out.reset(token)


def unreadable_facts() -> list[dict[str, Any]]:
    """Return the versions that the command has left out so far as JSON values, for lists of versions."""
    return [warning.to_dict() for warning in (_left_out.get() or {}).values()]


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
