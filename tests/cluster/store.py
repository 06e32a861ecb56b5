"""A store: a real HTTP server in threads, of the files of a folder, with ranges and listings."""

import re
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileStore:
    """Serves a folder on loopback, from `__enter__` to `__exit__`. What stands before it for others is an `Origin`.

    Args:
        folder: what is served.
    """

    def __init__(self, folder):
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, directory=folder))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, _request, _client_address):
        """Say nothing: clients go away on purpose."""


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not found or not path.is_file():
            super().do_GET()
            return
        size = path.stat().st_size
        start, stop = int(found[1]), min(int(found[2]) + 1, size)
        self.send_response(206)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            shutil.copyfileobj(_Part(file, stop - start), self.wfile)

    def log_message(self, *_arguments):
        """Say nothing."""


class _Part:
    """The next `length` bytes of a file."""

    def __init__(self, file, length):
        self._file, self._length = file, length

    def read(self, size):
        content = self._file.read(min(size, self._length))
        self._length -= len(content)
        return content
