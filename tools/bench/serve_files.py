"""Serve a folder over HTTP, with ranges and listings, as a distant store would: so fast, so late.

    python tools/bench/serve_files.py FOLDER --per-connection 35MB --latency-ms 20 --total 200MB

Takes the words of `serve_origin.py` and obeys its commands, but sends files itself, by `sendfile`: a forwarding
origin takes a core at 500 MB/s, which what is measured on a small machine would lack. A repository in the folder is
one that fsspec's `http` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, cast

from origin import Limits
from origin.pacing import Pacer, choose_step_bytes

from datasvc.sizes import parse_size

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class _Server(ThreadingHTTPServer):
    """Serves a folder within limits, and counts what leaves."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], folder: str, limits: Limits) -> None:
        super().__init__(address, _Handler)
        self.folder = folder
        self.limits = limits
        self.num_requests = 0
        self.bytes_by_path: Counter[str] = Counter()
        self._total = Pacer(limits.total_rate)
        self._lock = threading.Lock()

    def note(self, path: str) -> None:
        """Count a request."""
        with self._lock:
            self.num_requests += 1
            self.bytes_by_path[path] += 0

    def wait_turn(self, path: str, num_bytes: int, pacer: Pacer) -> None:
        """Wait until these bytes may leave, and count them."""
        with self._lock:
            now = time.monotonic()
            moment = max(each.reserve(num_bytes, now) for each in (self._total, pacer))
            self.bytes_by_path[path] += num_bytes
        time.sleep(max(0.0, moment - now))

    def obey(self, command: str) -> dict[str, Any]:
        """Answer a command, as `serve_origin.py` does."""
        with self._lock:
            if command == "counts":
                counted = self.bytes_by_path
                return {"requests": self.num_requests, "bytes": counted.total(), "paths": dict(counted)}
            if command == "forget":
                self.num_requests = 0
                self.bytes_by_path.clear()
                return {}
        return {"error": f"no such command: {command!r}"}

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
        self._origin = cast("_Server", self.server)
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
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - whoever called closes it
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


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--per-connection", type=parse_size, help="bytes per second, such as 35MB; default: no limit")
    parser.add_argument("--total", type=parse_size, help="bytes per second of all connections; default: no limit")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="to the first byte of an answer; default: 0")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    options = parser.parse_args()
    limits = Limits(options.per_connection, options.total, options.latency_ms / 1e3)
    with _Server((options.host, 0), options.folder, limits) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(json.dumps({"url": f"http://{options.host}:{server.server_port}"}), flush=True)
        for line in sys.stdin:
            print(json.dumps(server.obey(line.strip())), flush=True)
        server.shutdown()


if __name__ == "__main__":
    main()
