"""Options that many commands have, and the output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

from datasvc.cli.terminal.completion import reference
from datasvc.errors import ConfigError
from datasvc.printable import text_value

# rich is imported on first use: most output is plain lines, and `show` imports little.
if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

RepoOption = Annotated[
    str, typer.Option("--repo", envvar="DATASVC_REPO", help="Repository: a folder or any fsspec URL.")
]
RefArgument = Annotated[str, reference("NAME, NAME@VERSION or NAME@TAG; a data set: also NAME@BRANCH.")]
SplitOption = Annotated[str | None, typer.Option(help="Only this split; default: all splits.")]
WhereOption = Annotated[
    str | None,
    typer.Option(metavar="EXPR", help="SQL condition over the columns, such as \"class = 'cat' and width < 100\"."),
]
MessageOption = Annotated[str, typer.Option("--message", "-m", help="Description stored with the version.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do it. Without --yes, only print what would be removed.")]
DoneOption = Annotated[bool, typer.Option("--yes", help="Do it; also without --yes.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as in shells


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
