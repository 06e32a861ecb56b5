"""Entry point of `python -m datasvc.trainer.launch`."""

from __future__ import annotations

import sys

from datasvc.trainer.launch.command_line import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m datasvc.trainer.launch"))
