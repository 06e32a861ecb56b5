"""A server of `datasvc ui` as a process of its own, for benchmarks and screenshots."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .runner import environment


@dataclass(frozen=True)
class UiServer:
    """A running server: `address` without a slash at its end, and the id of its process."""

    address: str
    process: int

    def fetch(self, path: str) -> bytes:
        """Return the body of the response to one request."""
        with urllib.request.urlopen(self.address + path) as response:  # noqa: S310 - a server on the loopback
            return bytes(response.read())

    def peak_mb(self) -> float:
        """Return the largest resident memory that the process had, in MB; pages of mapped files count too."""
        status = Path(f"/proc/{self.process}/status").read_text(encoding="utf-8")
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak is not None
        return int(peak[1]) * 1024 / 1e6


@contextmanager
def running_server(url: str, home: Path, options: Sequence[str] = ()) -> Iterator[UiServer]:
    """Serve the pages of a repository. `home`: folder of its cache; `options`: more of `datasvc ui`."""
    command = [sys.executable, "-m", "datasvc", "ui", "--repo", url, "--port", "0", "--no-browser", "--json"]
    variables = environment(HOME=str(home))
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server has not started; its error is above")
        try:
            yield UiServer(json.loads(line)["url"].rstrip("/"), process.pid)
        finally:
            process.terminate()
