"""Run a node's server as a child process of a job, for as long as the job runs. `RankNodes` uses this.

The child is a program of its own (`python -m datasvc.node.embedded`) and exits with the job: see `ChildProcess`.
"""

from __future__ import annotations

import os
import pickle  # only between a job and its own child
import sys

from datasvc.child_process import ChildProcess, end_with_input
from datasvc.errors import ConfigError, DatasvcError
from datasvc.node.settings import NodeSettings


class EmbeddedNode:
    """A running server of this machine's cache.

    Args:
        settings: settings of the node.

    Attributes:
        url: URL of the server, which accepts connections already.

    Raises:
        ConfigError: the server did not start; the reason is on standard error.
        OSError: the process cannot be created.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._program = ChildProcess(__name__, settings, answers=True)
        self.url = self._program.read_line()
        if not self.url:
            self.close()
            raise ConfigError(
                f"the server of the cache {settings.folder} did not start; the reason is on standard error. If "
                "`datasvc serve` is already running, pass the URLs of the nodes instead"
            )

    def close(self) -> None:
        """Stop the server; a second call does nothing, nor does a call in a forked child."""
        self._program.close()


def main() -> None:
    """Serve with the pickled settings on standard input."""
    # Only the child serves: the ranks of a job, which import this module too, need no web server.
    from datasvc.node.server import serve

    settings: NodeSettings = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent process
    end_with_input()  # exit when the job ends; this may be at any time, because the cache survives a kill
    try:
        has_ended = serve(settings, lambda url: print(url, flush=True))  # noqa: T201 - the parent reads this line
    except DatasvcError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    if not has_ended:
        os._exit(0)  # do not wait for the threads that still run


if __name__ == "__main__":
    main()
