"""A web server of one file, with what can be wrong with one: real HTTP, in threads."""

import gzip
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECE_BYTES = 64 << 10


class FaultyServer:
    """Serves `content` under any path. Each request meets the next of `faults`, or `fault` when these are used up:

    a status        answered without a body
    "refuse"        hangs up before an answer
    "hang up"       after half of the bytes
    "stall"         after half of the bytes, for ever
    "silent"        no answer, for ever
    "trickle"       a few bytes at a time, for ever
    "short"         says that the file ends one byte sooner
    "long"          one byte more than asked for
    "no ranges"     always sends all
    "shifted"       sends another range, and says so
    "garbage"       no HTTP at all
    "closing"       ends the connection after the answer
    "no length"     ends the answer by hanging up
    "chunked"       sends the range in chunks
    "gzip"          sends the range compressed
    "redirect"      to another path, which is well

    Attributes:
        ranges: asked for: (start, stop), None where it is the whole.
        authorizations: that came with them.
        num_connections: that were opened.
        going: set it to end what lasts for ever.
    """

    def __init__(self, content, fault=None, *, faults=(), tls=None):
        self.content, self.fault, self.faults = content, fault, list(faults)
        self.ranges, self.authorizations = [], []
        self.num_connections = 0
        self.going = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                server.num_connections += 1

            def do_GET(self):
                server.answer(self)

            def log_message(self, *_arguments):
                """Say nothing."""

        self._scheme = "http" if tls is None else "https"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_arguments: None  # clients hang up on purpose
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self):
        return f"{self._scheme}://localhost:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self.going.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, handler):
        fault = self.faults.pop(0) if self.faults else self.fault
        if handler.path.startswith("/elsewhere"):
            fault = None
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        self.ranges.append(found and (int(found[1]), int(found[2]) + 1))
        self.authorizations.append(handler.headers.get("Authorization"))
        if fault == "silent":
            self.going.wait()
        if fault in ("refuse", "silent"):
            handler.close_connection = True
        elif fault == "garbage":
            handler.wfile.write(b"220 mail.example ESMTP\r\n")
            handler.close_connection = True
        elif isinstance(fault, int) or fault == "redirect":
            handler.send_response(302 if fault == "redirect" else fault)
            if fault == "redirect":
                handler.send_header("Location", f"{self.url}/elsewhere{handler.path}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        else:
            self._send(handler, fault, None if fault == "no ranges" else self.ranges[-1])

    def _send(self, handler, fault, wanted):
        content = self.content[:-1] if fault == "short" else self.content
        start, stop = wanted or (0, len(content))
        if fault == "long":
            content, stop = content + b"!", stop + 1
        if fault == "shifted":
            start += 1
        stop = min(stop, len(content))
        body = content[start:stop]
        handler.send_response(206 if wanted else 200)
        if wanted:
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        if fault == "gzip":
            body = gzip.compress(body, 1)
            handler.send_header("Content-Encoding", "gzip")
        if fault == "chunked":
            handler.send_header("Transfer-Encoding", "chunked")
        elif fault != "no length":
            handler.send_header("Content-Length", str(len(body)))
        if fault in ("closing", "no length"):
            handler.send_header("Connection", "close")  # which ends it after the answer
        handler.end_headers()
        self._send_body(handler, fault, body)

    def _send_body(self, handler, fault, body):
        if fault == "trickle":
            for offset in range(len(body)):
                handler.wfile.write(body[offset : offset + 1])
                if self.going.wait(0.005):
                    break
            handler.close_connection = True
            return
        if fault == "chunked":
            handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            return
        if fault in ("hang up", "stall"):
            body = body[: len(body) // 2]
            handler.close_connection = True
        for offset in range(0, len(body), PIECE_BYTES):
            handler.wfile.write(body[offset : offset + PIECE_BYTES])
        if fault == "stall":
            self.going.wait()
