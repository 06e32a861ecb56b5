"""Completion of names in shells: data sets and models, their versions, tags and branches.

A completion runs at each press of a key. It reads folders of this machine only, prints no error, and imports only the
command that is typed.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from datasvc.repository import Kind

VARIABLE: Final = "_DATASVC_COMPLETE"  # of Typer, set by the scripts for shells
_MAX_NAMES: Final = 1000


def reference(text: str, metavar: str | None = "REF") -> Any:
    """Return an argument that names data sets, models or their versions, which shells complete."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete_reference)


def complete_reference(context: typer.Context, incomplete: str) -> list[str]:
    """Return the references of data sets, or in `datasvc models` of models, that begin with a text."""
    from datasvc.repository import Repository
    from datasvc.repository.store.urls import local_root

    url = context.params.get("repo") or os.environ.get("DATASVC_REPO")
    if not url or local_root(str(url)) is None:
        return []  # a store on the network would take seconds
    kind: Kind = "models" if "models" in context.command_path.split() else "datasets"
    repository = Repository.open(str(url))
    name, at, _ = incomplete.partition("@")
    if not at:
        found = [each for each in repository.storage.list(kind) if each.startswith(incomplete)][:_MAX_NAMES]
        if found != [incomplete]:
            return found
    state = repository.state(kind, name)
    newest_first = [str(number) for number in reversed(state.living[-_MAX_NAMES:])]
    return [f"{name}@{each}" for each in (*state.tags, *state.branches, *newest_first)]


def run_completion(run: Callable[[str | None], None]) -> None:
    """Print what a shell asks for; on any failure nothing, because the text would be put into the command line.

    Args:
        run: runs the program; its argument is the command that is typed, None before it is complete.
    """
    words, prefix = os.environ.get("COMP_WORDS", ""), ""
    if "\n@" in words:
        words, prefix = _join_references(words.split("\n"))
    typed = (words or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):
        run(typed[1] if len(typed) > 2 or (len(typed) == 2 and words.endswith("\n")) else None)
    lines = filter(None, output.getvalue().splitlines())
    sys.stdout.write("".join(f"{line.removeprefix(prefix)}\n" for line in lines))


def _join_references(words: list[str]) -> tuple[str, str]:
    """Put `digits`, `@` and `3` together again, which bash has taken apart; return the words, and what bash keeps."""
    position = int(os.environ.get("COMP_CWORD", "0"))
    joined: list[str] = []
    current = 0
    for number, word in enumerate(words):
        if joined and number > 1 and (word == "@" or words[number - 1] == "@"):
            joined[-1] += word
        else:
            joined.append(word)
        if number == position:
            current = len(joined) - 1
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(current)}
    name, at, _ = joined[current].partition("@")
    return "\n".join(joined), name if at else ""
