"""`python -m trainer --data digits@1 --repo URL --name digits-cnn ...`: run the training recipe on this rank.

Several ranks: `python -m trainer.launch -np 2 python -m trainer ...`, or torchrun.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from datasvc.errors import DatasvcError
from trainer.recipes.config import TrainConfig
from trainer.recipes.train import train

_PAIRS = ("scale", "ratio")
_OPTIONAL_NUMBERS = ("resize", "block")


def parse_arguments(arguments: list[str] | None = None) -> TrainConfig:
    """Return the settings of a command line: one option for each field of `TrainConfig`."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    for field in dataclasses.fields(TrainConfig):
        option = f"--{field.name.replace('_', '-')}"
        if field.default is dataclasses.MISSING:
            parser.add_argument(option, required=True)
        elif field.name in _PAIRS:
            parser.add_argument(option, nargs=2, type=float, default=field.default, metavar=("LOW", "HIGH"))
        else:
            kind = str if field.default is None else type(field.default)
            kind = int if field.name in _OPTIONAL_NUMBERS else kind
            parser.add_argument(option, type=kind, default=field.default)
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    values |= {name: tuple(values[name]) for name in _PAIRS}
    return TrainConfig(**values)


def main() -> None:
    """Run the recipe; an error that a user can cause ends without a traceback."""
    try:
        train(parse_arguments())
    except DatasvcError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
