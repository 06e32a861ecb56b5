"""Ends the process groups of a launcher that is gone. Standard library only, started by ``local_job``.

The launcher holds the only write end of this program's standard input, so whatever ends the launcher, SIGKILL
included, closes the pipe. Lines ``+PID`` and ``-PID`` add and remove a process group. At the end of input the
groups that are left are killed. It works for any command, with its children, and without code that runs
between fork and exec. Not covered: a launcher killed in the microseconds between the start of a rank and its
``+PID``, and ranks that move to a session of their own.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads lines until the launcher is gone, then kills what is left."""
    # Signals for the launcher's terminal are the launcher's business.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
