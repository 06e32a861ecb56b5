"""`datasvc train`: runs the training program as one rank of a job."""

from __future__ import annotations

import typer


def train(context: typer.Context) -> None:
    """Train a model: `python -m datasvc.trainer` under a shorter name; `datasvc train --help` lists its options.

    Example: datasvc train --data digits@1 --repo ./repo --name digits-cnn

    Several ranks: datasvc-run -np 2 datasvc train ...
    """
    from datasvc.trainer.__main__ import main

    main(context.args, prog="datasvc train")
