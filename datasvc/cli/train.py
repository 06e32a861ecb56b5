"""`datasvc train`: runs the training program of `datasvc.trainer` as one rank of a job."""

from __future__ import annotations

from typing import Final

import typer

# The program parses all options itself, including `--help`.
PARSED_BY_PROGRAM: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def train(context: typer.Context) -> None:
    """Train a model, like `python -m datasvc.trainer`; `datasvc train --help` lists the options.

    Example: datasvc train --data digits@1 --repo ./repo --name digits-cnn

    Several ranks: datasvc-run -np 2 datasvc train ...
    """
    from datasvc.trainer.__main__ import main

    main(context.args, prog="datasvc train")
