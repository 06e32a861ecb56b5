"""The entry point of `horovodrun` and `python -m horovod.runner.launch`: the names of `horovod.runner.launch`."""

from __future__ import annotations

import sys

from datasvc.trainer.launch.command_line import main

__all__ = ["run_commandline"]


def run_commandline() -> int:
    """Run the launcher with the arguments of this process; return its exit status."""
    return main(prog="horovodrun")


if __name__ == "__main__":
    sys.exit(run_commandline())
