"""A node's server beside a job, without anybody's having started one: it lives exactly as long as who started it.

A program of its own (`python -m datasvc.node.embedded`): what it is told comes over its standard input, and it ends
with that, so with the job however that ends.
"""

from __future__ import annotations

import os
import pickle  # between a job and its own child
import subprocess
import sys
import threading
import weakref
from contextlib import suppress

from datasvc.errors import ConfigError
from datasvc.node.server import serve
from datasvc.node.settings import NodeSettings


class EmbeddedNode:
    """A running server of this machine's cache.

    Args:
        settings: of the node.

    Raises:
        ConfigError: it could not start; the reason is on standard error.
        OSError: no process could be made.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this very file
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._owner = os.getpid()
        _running.add(self)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            pickle.dump(settings, self._process.stdin)
            self._process.stdin.flush()
        self.url = self._process.stdout.readline().decode().strip()
        if not self.url:
            self.close()
            raise ConfigError(
                f"the server of the cache {settings.folder} did not start; why is on standard error. Where "
                "`datasvc serve` runs already, name the nodes instead"
            )

    def close(self) -> None:
        """End the server; closing again does nothing, nor does a forked child."""
        self.let_go()
        if self._owner == os.getpid():
            self._process.terminate()
            self._process.wait()

    def let_go(self) -> None:
        """Close this process's ends of the pipes: the server ends when nobody has them open any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


_running: weakref.WeakSet[EmbeddedNode] = weakref.WeakSet()


def _let_go_of_all() -> None:
    """In a forked child: its copies of the pipes would keep the servers running after the parent's end."""
    for node in list(_running):
        node.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


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
