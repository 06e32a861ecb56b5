"""A stand-in of the HTTP API of the Hugging Face Hub: the requests of `huggingface_hub.HfFileSystem`, and no others.

Repositories are folders `OWNER/NAME` below one folder, each with a branch `main`. Listings come in pages of three
entries. Files are redirected to another path, as those of the Hub are to its content network. The answers have the
fields and the headers that the Hub's documentation names.
"""

import hashlib
import json
import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_stand_in"
_PAGE = 3


class HubServer:
    """The server, running from `start` to `close`.

    Args:
        folder: folder of the repositories.
        private: names of the repositories that need `TOKEN`.

    Attributes:
        requests: method and path of every request, in order.
    """

    def __init__(self, folder, private=()):
        self.folder, self.private, self.requests = Path(folder), frozenset(private), []

    def start(self):
        """Start it; returns when it listens."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def close(self):
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_args):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self._answer()

    def _answer(self):
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if found := re.fullmatch(
            r"/content/(.+)", path
        ):  # the content network: its addresses are secret, not private
            self._send_content(self.hub.folder / found[1])
        elif found := re.fullmatch(
            r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?", path
        ):
            self._api(found[1], found[2], found[3], found[4] or "", parse_qs(parts.query), body)
        elif found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        else:
            self._refuse("EntryNotFound", HTTPStatus.NOT_FOUND)

    def _is_refused(self, name, revision):
        """Refuse an unknown or private repository as the Hub does, which does not tell the two apart."""
        if name in self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse("RepoNotFound", HTTPStatus.UNAUTHORIZED)
        elif not (self.hub.folder / name).is_dir():
            self._refuse("RepoNotFound", HTTPStatus.NOT_FOUND)
        elif revision not in {None, "main"}:
            self._refuse("RevisionNotFound", HTTPStatus.NOT_FOUND)
        else:
            return False
        return True

    def _api(self, name, action, revision, path, query, body):
        if self._is_refused(name, revision):
            return
        root = self.hub.folder / name
        if action in {None, "revision"}:
            self._send_json({"id": name, "sha": "0" * 40, "private": name in self.hub.private, "siblings": []})
        elif action == "paths-info":
            paths = json.loads(body)["paths"]
            self._send_json([_entry(root, root / each) for each in paths if (root / each).exists()])
        elif not (root / path).is_dir():
            self._refuse("EntryNotFound", HTTPStatus.NOT_FOUND)
        else:
            is_recursive = query.get("recursive", ["false"])[0].lower() in {"true", "1"}
            below = (root / path).rglob("*") if is_recursive else (root / path).iterdir()
            entries = [_entry(root, each) for each in sorted(below)]
            start = int(query.get("cursor", ["0"])[0])
            headers = {}
            if start + _PAGE < len(entries):
                words = "&".join(f"{key}={value[0]}" for key, value in query.items() if key != "cursor")
                next_page = f"{self.hub.url}{urlsplit(self.path).path}?{words}&cursor={start + _PAGE}"
                headers["Link"] = f'<{next_page}>; rel="next"'
            self._send_json(entries[start : start + _PAGE], headers)

    def _resolve(self, name, revision, path):
        if self._is_refused(name, revision):
            return
        file = self.hub.folder / name / path
        if not file.is_file():
            self._refuse("EntryNotFound", HTTPStatus.NOT_FOUND)
            return
        headers = {"Location": f"{self.hub.url}/content/{name}/{path}", "X-Repo-Commit": "0" * 40}
        headers |= {"X-Linked-Size": str(file.stat().st_size), "X-Linked-Etag": f'"{_oid(file)}"'}
        self._send(HTTPStatus.FOUND, b"", headers)

    def _send_content(self, file):
        content = file.read_bytes()
        headers = {"ETag": f'"{_oid(file)}"', "Accept-Ranges": "bytes"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, last = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            self._send(HTTPStatus.PARTIAL_CONTENT, content[start : last + 1], headers)
        else:
            self._send(HTTPStatus.OK, content, headers)

    def _send_json(self, value, headers=None):
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _refuse(self, code, status):
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status, body, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(root, path):
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
    return {"type": "file", "oid": _oid(path), "size": path.stat().st_size, "path": name}


def _oid(file):
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
