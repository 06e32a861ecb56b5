"""A node as its peers see it, with what can be wrong with one: a real HTTP server in threads."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from datasvc.cache.peers.membership import Nodes

PIECE_BYTES = 64 << 10


class Strangers:
    """Who the nodes are: none of them this machine, though they run here."""

    def __init__(self, *urls):
        self._urls = urls

    def nodes(self):
        return Nodes(self._urls, None)


class PeerServer:
    """Serves `contents`, by digest. `fault` is one of

    a status        answered to every request for an object
    "lie"           a byte in the middle is another one
    "hang up"       after half of the bytes
    "stall"         after half of the bytes, for ever
    "trickle"       a few bytes at a time, for ever
    "silent"        no answer until `going` is set, though it lives
    "dead"          no answer, and it does not live
    "short"         the object is shorter than it should be
    "no ranges"     it always sends all
    "shifted"       it sends another range than asked for
    "garbage"       no HTTP at all
    """

    def __init__(self, contents, fault=None, *, token=None, tls=None):
        self.contents = contents
        self.fault = fault
        self.token = token
        self.requests = []  # digest, range, query
        self.checked = []  # digests of objects that it was told to look at
        self.num_health_checks = 0
        self.answers_after_checks = None  # of its health, when it is "silent"
        self.going = threading.Event()  # set it to end what lasts for ever
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                split = urlsplit(self.path)
                if split.path == "/healthz":
                    peer.check_health(self)
                    return
                digest = split.path.removeprefix("/objects/")
                peer.requests.append((digest, self.headers.get("Range"), parse_qs(split.query)))
                peer.answer(self, digest)

            def do_POST(self):
                peer.checked.append(self.path.partition("?")[0].removeprefix("/objects/").removesuffix("/check"))
                self.answer(200)

            def answer(self, status, body=b"", headers=()):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments):
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_arguments: None  # clients hang up on purpose
        self._scheme = "http"
        if tls is not None:
            self._scheme = "https"
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self):
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self.going.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def check_health(self, handler):
        self.num_health_checks += 1
        if self.fault == "dead":
            self.going.wait()
        handler.answer(503, b"busy")  # says nothing about a request that is in hand
        if self.num_health_checks == self.answers_after_checks:
            self.going.set()

    def answer(self, handler, digest):
        if self.token is not None and handler.headers.get("Authorization") != f"Bearer {self.token}":
            handler.answer(401)
        elif isinstance(self.fault, int):
            handler.answer(self.fault)
        elif digest not in self.contents:
            handler.answer(404)
        elif self.fault == "dead":
            self.going.wait()
        elif self.fault == "garbage":
            handler.wfile.write(b"220 mail.example ESMTP\r\n")
            handler.close_connection = True
        else:
            if self.fault == "silent":
                self.going.wait()
            self._send(handler, self.contents[digest])

    def _send(self, handler, content):
        if self.fault == "short":
            content = content[:-1]
        if self.fault == "lie":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        start, stop = 0, len(content)
        if match and self.fault != "no ranges":
            start, stop = int(match[1]), int(match[2] or len(content) - 1) + 1
        if self.fault == "shifted":
            start, stop = start - 1, stop - 1
        body = content[start:stop]
        partial = match and self.fault != "no ranges"
        handler.send_response(206 if partial else 200)
        handler.send_header("Content-Length", str(len(body)))
        if partial:
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        handler.end_headers()
        self._send_body(handler, memoryview(body))

    def _send_body(self, handler, body):
        if self.fault == "trickle":
            for offset in range(len(body)):
                handler.wfile.write(body[offset : offset + 1])
                if self.going.wait(0.005):
                    break
            handler.close_connection = True
        elif self.fault in ("hang up", "stall"):
            handler.wfile.write(body[: len(body) // 2])
            if self.fault == "stall":
                self.going.wait()
            handler.close_connection = True
        else:
            for offset in range(0, len(body), PIECE_BYTES):
                handler.wfile.write(body[offset : offset + PIECE_BYTES])
