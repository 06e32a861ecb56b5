"""A node's server beside a job, without anybody's having started one: it lives exactly as long as who started it.

It is a program of its own (`python -m datasvc.node.embedded`) and ends when the job ends: see `ChildProcess`.
"""

from __future__ import annotations

import os
import pickle  # between a job and its own child
import sys
import threading

from datasvc.errors import ConfigError
from datasvc.node.server import serve
from datasvc.node.settings import NodeSettings
from datasvc.orphans import ChildProcess


class EmbeddedNode:
    """A running server of this machine's cache.

    Args:
        settings: of the node.

    Raises:
        ConfigError: it could not start; the reason is on standard error.
        OSError: no process could be made.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._program = ChildProcess(__name__, settings, answers=True)
        self.url = self._program.read_line()
        if not self.url:
            self.close()
            raise ConfigError(
                f"the server of the cache {settings.folder} did not start; why is on standard error. Where "
                "`datasvc serve` runs already, name the nodes instead"
            )

    def close(self) -> None:
        """End the server; closing again does nothing, nor does a forked child."""
        self._program.close()


def _end_with_input() -> None:
    # Not through the buffer, which Python wants back at its end; nothing comes after the settings.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)  # the cache survives its server's end at any instant


def main() -> None:
    """Serve with the settings that come first on standard input."""
    settings: NodeSettings = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent process
    threading.Thread(target=_end_with_input, daemon=True, name="datasvc-parent").start()
    try:
        ended = serve(settings, lambda url: print(url, flush=True))  # noqa: T201 - what the parent waits for
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    if not ended:
        os._exit(0)


if __name__ == "__main__":
    main()
