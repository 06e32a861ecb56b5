"""Entry point of the `datasvc` command line: the list of commands, and the exit status of each error."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any, Final

import typer

from datasvc import __version__
from datasvc.cli.runs import PARSED_BY_PROGRAM
from datasvc.cli.terminal.completion import VARIABLE, run_completion
from datasvc.cli.terminal.derived_options import derive_options
from datasvc.cli.terminal.output import print_line, report_unreadable
from datasvc.errors import DatasvcError
from datasvc.extras import explain_missing
from datasvc.printable import escape_unencodable

# Module and function of each command, below `datasvc.cli`, by section and in the order of the help. One without a
# function is a group of commands: the `app` of the module.
_SECTIONS: Final[dict[str, dict[str, tuple[str, str | None]]]] = {
    "Data sets": {
        "ingest": ("datasets.ingest", "ingest"),
        "attach": ("datasets.ingest", "attach"),
        "ls": ("datasets.listing", "ls"),
        "log": ("datasets.listing", "log"),
        "tag": ("datasets.tags", "tag"),
        "branch": ("datasets.branches", "branch"),
        "view": ("datasets.views", "view"),
        "delete": ("datasets.versions", "delete"),
        "columns": ("datasets.columns", "columns"),
        "label": ("datasets.columns", "label"),
        "compact": ("datasets.columns", "compact"),
        "classes": ("datasets.versions", "classes"),
        "merge": ("datasets.branches", "merge"),
        "combine": ("datasets.versions", "combine"),
        "revert": ("datasets.versions", "revert"),
        "rename": ("datasets.maintain", "rename"),
        "export": ("datasets.transfer", "export"),
        "push": ("datasets.transfer", "push"),
        "pull": ("datasets.transfer", "pull"),
        "copies": ("datasets.transfer", "copies"),
    },
    "Models and training": {
        "plan": ("plan", None),
        "train": ("runs", "train"),
        "forget": ("models.forget", "forget"),
        "models": ("models", None),
        "runs": ("runs", None),
        "audit": ("datasets.audit", "audit"),
        "replay": ("models.replay", "replay"),
        "bisect": ("models.replay", "bisect"),
    },
    "Nodes": {
        "stage": ("nodes.cache", "stage"),
        "cache": ("nodes.cache", None),
        "serve": ("nodes.serve", "serve"),
        "top": ("nodes.serve", "top"),
    },
    "Look": {
        "ui": ("ui", "ui"),
        "show": ("datasets.show", "show"),
        "head": ("datasets.show", "head"),
        "samples": ("datasets.samples", "samples"),
        "sample": ("datasets.samples", "sample"),
        "histogram": ("datasets.samples", "histogram"),
        "sql": ("datasets.show", "sql"),
        "diff": ("datasets.versions", "diff"),
        "report": ("runs", "report"),
    },
    "Maintenance": {
        "doctor": ("doctor", "doctor"),
        "verify": ("datasets.maintain", "verify"),
        "rm": ("datasets.maintain", "rm"),
        "purge": ("datasets.purge", "purge"),
        "certificates": ("datasets.purge", "certificates"),
        "gc": ("datasets.maintain", "gc"),
        "mark-lost": ("datasets.maintain", "mark_lost"),
    },
}


def make_app(command: str | None = None, *, names_only: bool = False) -> typer.Typer:
    """Return the command line.

    Args:
        command: name of a command or group; the result then has only this one, and no other module is imported, which
            would take longer than many commands. Any other name, or None: all of them.
        names_only: if there are all of them, leave out options that are derived, because only names are printed.
    """
    app = typer.Typer(
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        help="Versioned training data and model checkpoints. Exit status: 1 failed, 2 wrong usage, 3 corrupt data, "
        "4 conflict with another writer, 5 store unavailable, 6 committed without the bad samples, 130 interrupted.",
    )
    # Without a callback, Typer makes a single command the whole program.
    app.callback()(_options)
    is_known = any(command in commands for commands in _SECTIONS.values())
    for section, commands in _SECTIONS.items():
        for name, (module, function) in commands.items():
            if is_known and name != command:
                continue
            if function is None:
                app.add_typer(_load(module, "app"), name=name, rich_help_panel=section)
            else:
                settings = PARSED_BY_PROGRAM if name == "train" else None
                app.command(name, context_settings=settings, rich_help_panel=section)(_load(module, function))
    if is_known or not names_only:
        derive_options(app)
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
    escape_unencodable()
    if os.environ.get(VARIABLE, "").startswith("complete"):
        # One name however it was started: the scripts for completion in shells are made for this name.
        run_completion(lambda command: make_app(command, names_only=True)(prog_name="datasvc"))
        return
    try:
        with report_unreadable(), explain_missing("this command"):
            if sys.argv[1:] == ["--version"]:
                print_line(f"datasvc {__version__}")  # without the modules of all commands
                return
            # A command may come later: `datasvc -- ls`.
            make_app(sys.argv[1] if len(sys.argv) > 1 else None, names_only=len(sys.argv) < 3)(prog_name="datasvc")
    except (DatasvcError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            message = f"cannot use {error.filename}: {error.strerror.lower()}"
        # Print the lines of a message one by one: `print_line` escapes control characters, which names in the
        # message may contain, and it would escape the line breaks too.
        for line in f"error: {message}".split("\n"):
            print_line(line, err=True)
        sys.exit(error.exit_code if isinstance(error, DatasvcError) else 1)


if __name__ == "__main__":
    main()
