"""Entry point of the `datasvc` command line: the list of commands, and the exit status of each error."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, Final

import typer

from datasvc import __version__
from datasvc.cli.terminal.output import print_line
from datasvc.cli.terminal.unreadable import report_unreadable
from datasvc.errors import DatasvcError
from datasvc.extras import explain_missing

# Module and function of each command, below `datasvc.cli`, in the order of the help.
_COMMANDS: Final = {
    "ingest": ("datasets.ingest", "ingest"),
    "ls": ("datasets.listing", "ls"),
    "show": ("datasets.show", "show"),
    "head": ("datasets.show", "head"),
    "samples": ("datasets.samples", "samples"),
    "sample": ("datasets.samples", "sample"),
    "histogram": ("datasets.samples", "histogram"),
    "sql": ("datasets.show", "sql"),
    "log": ("datasets.listing", "log"),
    "tag": ("datasets.tags", "tag"),
    "branch": ("datasets.branches", "branch"),
    "delete": ("datasets.versions", "delete"),
    "classes": ("datasets.versions", "classes"),
    "diff": ("datasets.versions", "diff"),
    "merge": ("datasets.versions", "merge"),
    "revert": ("datasets.versions", "revert"),
    "rename": ("datasets.remove", "rename"),
    "rm": ("datasets.remove", "rm"),
    "export": ("datasets.export", "export"),
    "push": ("datasets.transfer", "push"),
    "pull": ("datasets.transfer", "pull"),
    "verify": ("datasets.maintain", "verify"),
    "gc": ("datasets.maintain", "gc"),
    "mark-lost": ("datasets.maintain", "mark_lost"),
    "audit": ("datasets.audit", "audit"),
    "stage": ("nodes.cache", "stage"),
    "serve": ("nodes.serve", "serve"),
    "top": ("nodes.serve", "top"),
    "report": ("runs", "report"),
    "ui": ("ui", "ui"),
    "train": ("train", "train"),
    "doctor": ("doctor", "doctor"),
}
# Module of each group of commands; the group is its `app`.
_GROUPS: Final = {"cache": "nodes.cache", "models": "models", "runs": "runs"}
# The training program parses all options itself, including `--help`.
_TRAIN_SETTINGS: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def make_app(command: str | None = None) -> typer.Typer:
    """Return the command line.

    Args:
        command: name of a command or group; the result then has only this one, and no other module is imported, which
            would take longer than many commands. Any other name, or None: all of them.
    """
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Versioned training data and model checkpoints. Exit status: 1 failed, 2 wrong usage, 3 corrupt data, "
        "4 conflict with another writer, 5 store unavailable, 6 committed without the bad samples, 130 interrupted.",
    )
    # Without a callback, Typer makes a single command the whole program.
    app.callback()(_options)
    names = [command] if command in {*_COMMANDS, *_GROUPS} else [*_COMMANDS, *_GROUPS]
    for name in names:
        if name in _GROUPS:
            app.add_typer(_load(_GROUPS[name], "app"), name=name)
        else:
            settings = _TRAIN_SETTINGS if name == "train" else None
            app.command(name, context_settings=settings)(_load(*_COMMANDS[name]))
    return app


def _print_version(requested: bool) -> None:
    if requested:
        print_line(f"datasvc {__version__}")
        raise typer.Exit


def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _load(module: str, attribute: str) -> Any:
    return getattr(importlib.import_module(f"datasvc.cli.{module}"), attribute)


def main() -> None:
    """Run the command line. Print an expected error without a traceback, and exit with its status."""
    try:
        with report_unreadable(), explain_missing("this command"):
            if sys.argv[1:] == ["--version"]:
                print_line(f"datasvc {__version__}")  # without the modules of all commands
                return
            # One name however it was started: the scripts for completion in shells are made for this name.
            make_app(sys.argv[1] if len(sys.argv) > 1 else None)(prog_name="datasvc")
    except (DatasvcError, OSError) as error:
        # Print the lines of a message one by one: `print_line` escapes control characters, which names in the
        # message may contain, and it would escape the line breaks too.
        for line in f"error: {error}".split("\n"):
            print_line(line, err=True)
        sys.exit(error.exit_code if isinstance(error, DatasvcError) else 1)


if __name__ == "__main__":
    main()
