"""An HTTP proxy before an S3 server that answers some requests with 503, or hangs up, or cuts an answer short."""

import http.client
import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class FlakyProxy:
    """Forwards requests to `endpoint`; `choose(number, method, path)` says what goes wrong with each.

    That is "503", "hang up", "truncate", or None for nothing. Numbers count from 1.
    """

    def __init__(self, endpoint, choose):
        target = urlsplit(endpoint).netloc
        numbers = itertools.count(1)
        self.faults = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                fault = choose(next(numbers), self.command, self.path)
                if fault is not None:
                    proxy.faults += 1
                if fault == "hang up":
                    self.close_connection = True
                    return
                if fault == "503":
                    self.answer(503, {"Content-Type": "application/xml"}, b"<Error><Code>SlowDown</Code></Error>")
                    return
                connection = http.client.HTTPConnection(target)
                # The signature covers the host that the client saw: it goes through as it is.
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                answer = connection.getresponse()
                content = answer.read()
                self.answer(answer.status, dict(answer.getheaders()), content, cut=fault == "truncate")
                connection.close()

            def answer(self, status, headers, content, *, cut=False):
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in {"content-length", "transfer-encoding", "connection", "server", "date"}:
                        self.send_header(name, value)
                length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self.close_connection = True

            # The names that `http.server` looks for.
            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

            def log_message(self, *_arguments):
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
