"""An origin in a process of its own, which ends with its parent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from .pacing import Limits

_ROOT: Final = Path(__file__).parents[3]


class OriginProcess:
    """Runs `tools.bench.origin` from `__enter__` to `__exit__`. It ends with its input, so it never outlives us.

    Args:
        upstream: the URL of the store, or a folder.
        limits: how fast, how late.
        host: the address to listen on.
        prefix: command that runs the origin, such as one that enters a namespace.
    """

    def __init__(
        self,
        upstream: str,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        *,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        command = [*prefix, sys.executable, "-m", "tools.bench.origin", upstream, "--host", host]
        command += ["--latency-ms", str(limits.latency_s * 1e3)]
        for option, rate in (("--per-connection", limits.connection_rate), ("--total", limits.total_rate)):
            command += [] if rate is None else [option, str(rate)]
        self._command = command
        self.url = ""

    def __enter__(self) -> Self:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, cwd=_ROOT, text=True, **pipes)
        self.url = self._read()["url"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()

    def counts(self) -> dict[str, Any]:
        """Return `{"requests": int, "bytes": int, "paths": {path without query: bytes}}` since start or `forget`."""
        return self._ask("counts")

    def forget(self) -> None:
        """Count again from here."""
        self._ask("forget")

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the origin ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found
