"""A stand-in of the HTTP API of the Hugging Face Hub: the requests that its client sends in tests, and no others.

Data sets are folders `OWNER/NAME` below one folder, models are `models/OWNER/NAME`, each with a branch `main` and its
newest commit. Uploads are those of Git LFS, without Xet. Listings come in pages of three
entries. Files are redirected to another path, as those of the Hub are to its content network. The answers have the
fields and the headers that the Hub's documentation names.
"""

import base64
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
        commits: for each repository with commits, the path of its folder below `folder`, their messages.
        tags: commits by (repository, tag).
        failing: number of uploads of large files that fail before the next one succeeds.
    """

    def __init__(self, folder, private=()):
        self.folder, self.private, self.requests = Path(folder), frozenset(private), []
        self.commits, self.tags, self.failing = {}, {}, 0
        self.large_files = {}  # content by SHA-256

    def commit_of(self, name):
        """Return the id of the newest commit of a repository."""
        return f"{len(self.commits.get(name, ())):040x}"

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

    def do_PUT(self):
        self._answer()

    def _answer(self):
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if found := re.fullmatch(r"/content/(.+)", path):
            # The content network: its addresses are secret, not private.
            self._send_content(self.hub.folder / found[1])
        elif found := re.fullmatch(r"/upload/(\w+)", path):
            self._upload(found[1], body)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._start_uploads(json.loads(body))
        elif found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/(preupload|commit|tag)/([^/]+)", path):
            self._change(_folder_of(found[1], found[2]), found[3], found[4], body)
        elif found := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?", path
        ):
            name = _folder_of(found[1], found[2])
            self._api(name, found[3], found[4], found[5] or "", parse_qs(parts.query), body)
        elif found := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(_folder_of(found[1] or "models", found[2]), found[3], found[4])
        else:
            self._refuse("EntryNotFound", HTTPStatus.NOT_FOUND)

    def _create(self, wanted):
        name = _folder_of(f"{wanted.get('type', 'model')}s", f"{wanted.get('organization', 'lab')}/{wanted['name']}")
        exists = (self.hub.folder / name).is_dir()
        (self.hub.folder / name).mkdir(parents=True, exist_ok=True)
        status = HTTPStatus.CONFLICT if exists else HTTPStatus.OK
        self._send_json({"url": f"{self.hub.url}/{name}"}, status=status)

    def _change(self, name, action, revision, body):
        if action == "tag":
            wanted = json.loads(body)
            self.hub.tags[name, wanted["tag"]] = revision
            self._send_json({})
        elif self._is_refused(name, revision):
            return
        elif action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._send_json({"files": [_upload_mode(self.hub.folder / name, path) for path in paths]})
        else:
            self._commit(name, [json.loads(line) for line in body.splitlines()])

    def _start_uploads(self, wanted):
        objects = []
        for each in wanted["objects"]:
            action = {"upload": {"href": f"{self.hub.url}/upload/{each['oid']}", "header": {}}}
            objects.append(each if each["oid"] in self.hub.large_files else each | {"actions": action})
        self._send_json({"transfer": "basic", "objects": objects})

    def _upload(self, digest, body):
        if self.hub.failing:
            self.hub.failing -= 1
            self._send(HTTPStatus.FORBIDDEN, b"", {})
            return
        assert hashlib.sha256(body).hexdigest() == digest
        self.hub.large_files[digest] = body
        self._send(HTTPStatus.OK, b"", {})

    def _commit(self, name, lines):
        for kind, value in ((line["key"], line["value"]) for line in lines):
            if kind == "header":
                self.hub.commits.setdefault(name, []).append(value["summary"])
                continue
            file = self.hub.folder / name / value["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                file.write_bytes(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                file.write_bytes(self.hub.large_files[value["oid"]])
            else:
                assert kind == "deletedFile", kind
                file.unlink()
        commit = self.hub.commit_of(name)
        self._send_json({"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit})

    def _is_refused(self, name, revision):
        """Refuse an unknown or private repository as the Hub does, which does not tell the two apart."""
        if name in self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse("RepoNotFound", HTTPStatus.UNAUTHORIZED)
        elif not (self.hub.folder / name).is_dir():
            self._refuse("RepoNotFound", HTTPStatus.NOT_FOUND)
        elif revision not in {None, "main", self.hub.commit_of(name), *self._tags_of(name)}:
            self._refuse("RevisionNotFound", HTTPStatus.NOT_FOUND)
        else:
            return False
        return True

    def _tags_of(self, name):
        commit = self.hub.commit_of(name)
        return {tag for (repository, tag), tagged in self.hub.tags.items() if (repository, tagged) == (name, commit)}

    def _api(self, name, action, revision, path, query, body):
        if self._is_refused(name, revision):
            return
        root = self.hub.folder / name
        if action in {None, "revision"}:
            files = [{"rfilename": _entry(root, file)["path"]} for file in sorted(root.rglob("*")) if file.is_file()]
            facts = {"id": name, "sha": self.hub.commit_of(name), "private": name in self.hub.private}
            self._send_json(facts | {"siblings": files})
        elif action == "paths-info":
            is_form = self.headers.get_content_type() == "application/x-www-form-urlencoded"
            paths = parse_qs(body.decode())["paths"] if is_form else json.loads(body)["paths"]
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
        # Another host, as that of the Hub: clients answer a HEAD without it.
        elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
        headers = {"Location": f"{elsewhere}/content/{name}/{path}", "X-Repo-Commit": self.hub.commit_of(name)}
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

    def _send_json(self, value, headers=None, status=HTTPStatus.OK):
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

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


def _folder_of(kind, name):
    return f"models/{name}" if kind == "models" else name


def _upload_mode(root, path):
    """Return how a file is to be sent, and the id of the one that is there: for a large file its SHA-256."""
    is_large, file = path.endswith((".safetensors", ".parquet")), root / path
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if is_large and file.is_file() else _oid(file)
    return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": digest}


def _oid(file):
    if not file.is_file():
        return None
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
