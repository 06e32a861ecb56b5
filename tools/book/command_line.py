"""Writes the reference of the command line: a page for each group of commands, and one for the other programs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from datasvc.cli.main import make_app

_DATA_INTRO = "Written from the program's own help. `datasvc COMMAND --help` prints the same."
# The programs that parse their own options.
_PROGRAMS = {
    "datasvc-run": ["-m", "datasvc.trainer.launch", "--help"],
    "python -m datasvc.trainer": ["-m", "datasvc.trainer", "--help"],
    "python -m datasvc.trainer profile": ["-m", "datasvc.trainer", "profile", "--help"],
    "datasvc plan layouts": ["-m", "datasvc", "plan", "layouts", "--help"],
}


def write_commands(folder: Path) -> None:
    """Write the pages `commands.md`, `commands-GROUP.md` and `programs.md` to `folder`."""
    app: Any = typer.main.get_command(make_app())
    groups = {name: command for name, command in app.commands.items() if hasattr(command, "commands")}
    commands = {name: command for name, command in app.commands.items() if name not in groups}
    pages = {"commands": ("datasvc", commands)}
    pages |= {f"commands-{name}": (f"datasvc {name}", group.commands) for name, group in groups.items()}
    for page, (program, listed) in pages.items():
        sections = [f"# {program}", _DATA_INTRO]
        for name, command in listed.items():
            sections += _describe(f"{program} {name}", command)
        (folder / f"{page}.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    helps = ["# Other programs", *(_help_of(program, arguments) for program, arguments in _PROGRAMS.items())]
    (folder / "programs.md").write_text("\n\n".join(helps) + "\n", encoding="utf-8")


def _describe(title: str, command: Any) -> Iterator[str]:
    """Give the paragraphs about one command: how it is called, its help, its arguments and options."""
    context = command.context_class(command, info_name=title)
    yield f"## {title}"
    yield f"```text\n{' '.join(command.get_usage(context).removeprefix('Usage: ').split())}\n```"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield f"```text\n{paragraph}\n```" if paragraph.startswith("Example") else _escape(paragraph)
    records = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    if records:
        rows = [f"| `{_cell(name)}` | {_cell(_escape(text))} |" for name, text in records]
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows])


def _escape(text: str) -> str:
    """Escape what Markdown or HTML would interpret, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    escaped = [part if number % 2 else re.sub(r"([<>*_\[\]\\])", r"\\\1", part) for number, part in enumerate(parts)]
    return "".join(escaped)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _help_of(program: str, arguments: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    return f"## {program}\n\n```text\n{done.stdout.strip()}\n```"
