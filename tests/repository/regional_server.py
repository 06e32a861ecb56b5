"""An S3 server in front of another one: its buckets are in one region, and the way to it may be slow."""

import http.client
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REDIRECT = b"<Error><Code>PermanentRedirect</Code><Message>Use the specified endpoint.</Message></Error>"
OTHER_REGION = b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>expecting another region</Message></Error>"


class RegionalServer:
    """Forwards what is signed for `region`, and answers the rest as S3 does: with the region, without a location.

    Args:
        target: URL of the server that has the buckets.
        region: region of all buckets.
        upload_s: how long each PUT takes.
        answer: status and content of the answer to a request that is signed for another region.

    Attributes:
        regions: asked for by each request: those that it was signed for, or None.
        keys: with whose key each request was signed, or None.
    """

    def __init__(self, target, region="us-east-1", *, upload_s=0, answer=(301, REDIRECT)):
        self._target, self._region, self._upload_s, self._answer = urlsplit(target).netloc, region, upload_s, answer
        self.regions, self.keys = [], []
        self._ended = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_arguments):
                """Say nothing."""

        def respond(handler):
            self.respond(handler)

        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", respond)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_arguments: None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def respond(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        signed = re.search(r"Credential=([^/]+)/\d+/([^/]+)/", handler.headers.get("Authorization", ""))
        self.keys.append(signed and signed[1])
        self.regions.append(signed and signed[2])
        if handler.command == "PUT":
            self._ended.wait(self._upload_s)
        if signed is None:
            status, headers, content = 403, {}, b""
        elif signed[2] != self._region:
            (status, content), headers = self._answer, {}
        else:
            status, headers, content = self._forward(handler, body)
        handler.send_response_only(status)
        for name, value in (headers or {"x-amz-bucket-region": self._region}).items():
            handler.send_header(name, value)
        if not any(name.lower() == "content-length" for name in headers):
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def _forward(self, handler, body):
        connection = http.client.HTTPConnection(self._target)
        connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
        for name, value in handler.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        content = answer.read()
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in {"connection", "transfer-encoding"}
            and (name.lower() != "content-length" or handler.command == "HEAD")
        }
        connection.close()
        return answer.status, kept, content
