"""The launcher's command line: ``python -m trainer.launch -np 2 python train.py``.

Exit status: 0 when all ranks end well, else that of the first rank that failed, 128 + N for signal N.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.local_job import LocalJob, run_local_job


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, runs the job, and says on standard error which rank failed first."""
    job = parse_arguments(arguments)
    try:
        failure = run_local_job(job, os.environ)
    except OSError as error:
        print(f"trainer.launch: cannot run {job.command[0]}: {error}", file=sys.stderr)  # noqa: T201 - a command line's answer
        return 127
    if failure is None:
        return 0
    print(f"trainer.launch: {failure.describe()}", file=sys.stderr)  # noqa: T201 - see above
    return failure.exit_status


def parse_arguments(arguments: Sequence[str] | None = None) -> LocalJob:
    """The job that the command line describes; leaves the process with status 2 if it describes none."""
    parser = argparse.ArgumentParser(
        prog="trainer.launch", description="Run a program as the ranks of one data-parallel job."
    )
    parser.add_argument("-np", "--num-proc", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--no-prefix", action="store_true", help="do not begin output lines with [rank]")
    parser.add_argument(
        "--output-filename",
        type=Path,
        metavar="DIR",
        help="also write DIR/rank.N/stdout and DIR/rank.N/stderr",
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        default=5.0,
        help="seconds between SIGTERM and SIGKILL (default: %(default)s)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("the program to run is missing")
    if options.num_proc < 1:
        parser.error("there must be at least one rank")
    return LocalJob(
        command=command,
        num_ranks=options.num_proc,
        grace_s=options.grace_s,
        prefixes_lines=options.num_proc > 1 and not options.no_prefix,
        output_folder=options.output_filename,
    )


if __name__ == "__main__":
    sys.exit(main())
