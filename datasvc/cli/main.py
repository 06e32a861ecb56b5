"""Entry point of the `datasvc` command line: the list of commands, and the exit status of each error."""

from __future__ import annotations

import sys

import typer

from datasvc.cli import models, train
from datasvc.cli.datasets import audit, export, ingest, listing, maintain, remove, show, tags, versions
from datasvc.cli.nodes import cache, serve
from datasvc.cli.terminal.output import print_line
from datasvc.cli.terminal.unreadable import report_unreadable
from datasvc.errors import DatasvcError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Versioned training data and model checkpoints. Exit status: 1 failed, 2 wrong usage, 3 corrupt data, "
    "4 conflict with another writer, 5 store unavailable, 6 committed without the bad samples, 130 interrupted.",
)
app.command()(ingest.ingest)
app.command()(listing.ls)
app.command()(show.show)
app.command()(show.head)
app.command()(show.sql)
app.command()(listing.log)
app.command()(tags.tag)
app.command()(versions.delete)
app.command()(versions.classes)
app.command()(versions.diff)
app.command()(versions.merge)
app.command()(versions.revert)
app.command()(remove.rename)
app.command()(remove.rm)
app.command()(export.export)
app.command()(maintain.verify)
app.command()(maintain.gc)
app.command()(maintain.mark_lost)
app.command()(audit.audit)
app.command()(cache.stage)
app.command()(serve.serve)
app.command()(serve.top)
# The training program parses all options itself, including `--help`.
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(train.train)
app.add_typer(cache.app, name="cache")
app.add_typer(models.app, name="models")


def main() -> None:
    """Run the command line. Print an expected error without a traceback, and exit with its status."""
    try:
        with report_unreadable():
            app()
    except (DatasvcError, OSError) as error:
        # Print the lines of a message one by one: `print_line` escapes control characters, which names in the
        # message may contain, and it would escape the line breaks too.
        for line in f"error: {error}".split("\n"):
            print_line(line, err=True)
        sys.exit(error.exit_code if isinstance(error, DatasvcError) else 1)


if __name__ == "__main__":
    main()
