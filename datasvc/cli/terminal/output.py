"""How commands print: tables and progress bars for people, JSON for machines."""

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

_CAME = {"origin": "origin", "peer": "peers", "resident": "hits"}

RepoOption = Annotated[
    str, typer.Option("--repo", envvar="DATASVC_REPO", help="Repository: a folder or any fsspec URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def print_json_line(value: Any) -> None:
    """Print one JSON document on a line of its own, at once: for commands that report while they work."""
    sys.stdout.write(json.dumps(value, sort_keys=True, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows for people; plain tab-separated text where the output is no terminal."""
    if not sys.stdout.isatty():
        for row in rows:
            sys.stdout.write("\t".join(text_value(str(each)) for each in row) + "\n")
        return
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(text_value(str(each)) for each in row))
    Console().print(table)


def print_facts(facts: Mapping[str, object]) -> None:
    """Print `name: value` lines; a nested mapping becomes indented lines."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            sys.stdout.write(f"{name}:\n")
            for key, each in value.items():
                sys.stdout.write(f"  {text_value(str(key))}: {text_value(str(each))}\n")
        else:
            sys.stdout.write(f"{text_value(str(name))}: {text_value(str(value))}\n")


@contextmanager
def staging_progress(title: str, total_bytes: int | None) -> Iterator[Callable[[str, int], None]]:
    """Show a bar of bytes, rate, time left and where bytes come from on a terminal; elsewhere nothing.

    Yields:
        A function, for any thread, that counts bytes by where they came from: "resident", "origin", "peer".
    """
    counted: Counter[str] = Counter()
    lock = threading.Lock()
    with byte_bar(TextColumn("{task.fields[came]}")) as bar:
        task = bar.add_task(title, total=total_bytes, came="")

        def count(kind: str, size_bytes: int) -> None:
            with lock:
                counted[kind] += size_bytes
                came = ", ".join(f"{name} {format_size(counted[key])}" for key, name in _CAME.items() if counted[key])
            bar.update(task, advance=size_bytes, came=came)

        yield count
