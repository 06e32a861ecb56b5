"""What ``horovodrun`` and ``python -m horovod.runner.launch`` start: the names of ``horovod.runner.launch``."""

import sys

from datasvc.trainer.launch.command_line import main

__all__ = ["run_commandline"]

run_commandline = main

if __name__ == "__main__":
    sys.exit(run_commandline())
