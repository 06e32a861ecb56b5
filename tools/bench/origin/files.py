"""A folder served over HTTP by `sendfile`, with ranges and listings, as a distant store would: so fast, so late.

A forwarding origin takes a core at 500 MB/s, which what is measured on a small machine would lack. A repository in
the folder is one that fsspec's `http` reads.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import Counter
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from .pacing import Limits, Pacer, choose_step_bytes

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class FileOrigin(ThreadingHTTPServer):
    """Serves a folder within limits, and counts what leaves.

    Args:
        folder: to serve.
        limits: how fast, how late.
        host: the address to listen on.
        port: 0 for any that is free.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: str, limits: Limits, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.folder = folder
        self.limits = limits
        self.url = f"http://{host}:{self.server_port}"
        self._counted: Counter[str] = Counter()
        self._num_requests = 0
        self._total = Pacer(limits.total_rate)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()

    def counts(self) -> dict[str, Any]:
        """Return requests, and bytes in all and by path."""
        with self._lock:
            return {
                "requests": self._num_requests,
                "bytes": self._counted.total(),
                "paths": dict(self._counted),
            }

    def forget(self) -> None:
        """Count again from here."""
        with self._lock:
            self._num_requests = 0
            self._counted.clear()

    def note(self, path: str) -> None:
        """Count a request."""
        with self._lock:
            self._num_requests += 1
            self._counted[path] += 0

    def wait_turn(self, path: str, num_bytes: int, pacer: Pacer) -> None:
        """Wait until these bytes may leave, and count them."""
        with self._lock:
            now = time.monotonic()
            moment = max(each.reserve(num_bytes, now) for each in (self._total, pacer))
            self._counted[path] += num_bytes
        time.sleep(max(0.0, moment - now))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(SimpleHTTPRequestHandler):
    """Answers one connection: whole files, single ranges, listings."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._origin = cast("FileOrigin", self.server)
        self._pacer = Pacer(self._origin.limits.connection_rate)
        self._stop: int | None = None  # where the range that is answered ends
        self.directory = self._origin.folder

    def send_head(self) -> BinaryIO | None:  # type: ignore[override]
        self._origin.note(self.path)
        time.sleep(self._origin.limits.latency_s)
        path = self.translate_path(self.path)
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        self._stop = None
        if wanted is None or not os.path.isfile(path):
            return cast("BinaryIO | None", super().send_head())
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
        size_bytes = os.fstat(file.fileno()).st_size
        start, last = int(wanted[1]), min(int(wanted[2] or size_bytes), size_bytes - 1)
        if start > last:
            file.close()
            self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return None
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Range", f"bytes {start}-{last}/{size_bytes}")
        self.send_header("Content-Length", str(last + 1 - start))
        self.end_headers()
        file.seek(start)
        self._stop = last + 1
        return cast("BinaryIO", file)

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send what `send_head` announced."""
        try:
            descriptor = source.fileno()
        except OSError:  # a listing, made in memory
            outputfile.write(source.read())
            return
        offset = source.tell()
        stop = os.fstat(descriptor).st_size if self._stop is None else self._stop
        limits = self._origin.limits
        step = choose_step_bytes(limits.connection_rate, limits.total_rate)
        self._pacer.begin(time.monotonic())
        while offset < stop:
            length = min(step, stop - offset)
            self._origin.wait_turn(self.path, length, self._pacer)
            offset += os.sendfile(self.connection.fileno(), descriptor, offset, length)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""
