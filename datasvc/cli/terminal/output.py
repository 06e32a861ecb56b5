"""Output of commands: tables and progress bars for people, JSON for programs."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from datasvc.cli.terminal.values import text_value
from datasvc.progress import byte_bar
from datasvc.sizes import format_size

# How the progress bar names each source of bytes.
_SOURCE_LABELS = {"origin": "origin", "peer": "peers", "resident": "hits"}

RepoOption = Annotated[
    str, typer.Option("--repo", envvar="DATASVC_REPO", help="Repository: a folder or any fsspec URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def print_json_line(value: Any) -> None:
    """Print one JSON document as a single line and flush it; for commands that print events while they run."""
    sys.stdout.write(json.dumps(value, sort_keys=True, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; without a header and with tabs between values if the output is not a terminal."""
    if not sys.stdout.isatty():
        for row in rows:
            sys.stdout.write("\t".join(text_value(str(value)) for value in row) + "\n")
        return
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(text_value(str(value)) for value in row))
    Console().print(table)


def print_facts(facts: Mapping[str, object]) -> None:
    """Print `name: value` lines; a nested mapping becomes indented lines."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            sys.stdout.write(f"{name}:\n")
            for key, nested_value in value.items():
                sys.stdout.write(f"  {text_value(str(key))}: {text_value(str(nested_value))}\n")
        else:
            sys.stdout.write(f"{text_value(str(name))}: {text_value(str(value))}\n")


@contextmanager
def staging_progress(title: str, total_bytes: int | None) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar with rate, time left and bytes per source; nothing if stderr is not a terminal.

    Yields:
        A thread-safe function that counts bytes of one source: "resident", "origin" or "peer".
    """
    bytes_by_source: Counter[str] = Counter()
    lock = threading.Lock()
    with byte_bar(TextColumn("{task.fields[sources]}")) as bar:
        task = bar.add_task(title, total=total_bytes, sources="")

        def count(source: str, size_bytes: int) -> None:
            with lock:
                bytes_by_source[source] += size_bytes
                sources = ", ".join(
                    f"{label} {format_size(bytes_by_source[key])}"
                    for key, label in _SOURCE_LABELS.items()
                    if bytes_by_source[key]
                )
            bar.update(task, advance=size_bytes, sources=sources)

        yield count
