"""Sources and repositories on S3: the same data sets as on a disk, over connections that fail."""

import functools
import os
import secrets
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from datasvc.errors import DatasvcError, UnavailableError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources import SourceOptions
from tests.faults.flaky_proxy import FlakyProxy
from tests.samples import class_sorted, write_tars
from tests.support import warm_python

ROOT = Path(__file__).parents[2]


def digests(repository, ref):
    return {name: split.digest for name, split in open_dataset(repository, ref).items()}


def upload(folder, url):
    file_system, root = fsspec.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            file_system.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return url


@pytest.fixture
def remote(s3_bucket):
    return f"{s3_bucket}/{secrets.token_hex(8)}"


@pytest.fixture(params=["listed", "streamed"])
def source(request, folder, tmp_path):
    """A source and the options that give it several shards."""
    if request.param == "listed":
        return folder, {"shard_bytes": 4000}
    return write_tars(tmp_path / "tars", class_sorted(60, 4), per_tar=12), {"shard_bytes": 6000}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("source", ["listed", pytest.param("streamed", marks=pytest.mark.slow)], indirect=True)
def test_a_remote_source_into_a_remote_repository_gives_the_digests_of_a_local_one(repository, remote, source):
    where, options = source
    ingest(repository, str(where), "pets", **options)
    there = Repository.create(f"{remote}/repo")
    uploaded = upload(where, f"{remote}/source")
    ingest(there, uploaded, "pets", workers=2, **options)
    assert digests(there, "pets") == digests(repository, "pets")
    for split in open_dataset(there, "pets").values():
        assert sum(1 for _ in split) == len(split)
    assert fsspec.url_to_fs(remote)[0].find(f"{there.url.removeprefix('s3://')}/journal") == []


INTERRUPTED = """
import os, signal, sys
from datasvc.repository import Repository
from datasvc.repository.logs.journal import Journal
from datasvc.shards import ingest
left = 2
real = Journal.write
def write(self, name, content):
    global left
    real(self, name, content)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.write = write
ingest(Repository.open(sys.argv[1]), sys.argv[2], "pets", shard_bytes=int(sys.argv[3]))
"""


@pytest.mark.slow
def test_an_interrupted_remote_ingest_is_continued(repository, remote, source):
    where, options = source
    ingest(repository, str(where), "pets", **options)
    there = Repository.create(f"{remote}/repo")
    uploaded = upload(where, f"{remote}/source")
    words = [warm_python.command(), "-c", INTERRUPTED, there.url, uploaded, str(options["shard_bytes"])]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -9
    assert there.names("datasets") == []
    assert ingest(there, uploaded, "pets", **options).num_resumed >= 1
    assert digests(there, "pets") == digests(repository, "pets")


@pytest.mark.slow
def test_a_remote_append_and_a_local_one_give_the_same_version(repository, remote, folder):
    there = Repository.create(f"{remote}/repo")
    more = [{"key": "more", "image": (folder / "train" / "a" / "00000.jpg").read_bytes(), "label": 0}]
    for each in (repository, there):
        ingest(each, str(folder), "pets", shard_bytes=4000)
        ingest(each, more, "pets", append=True)
    assert digests(there, "pets@2") == digests(repository, "pets@2")


@pytest.fixture
def flaky(s3_bucket, monkeypatch):
    """A function that puts a faulty proxy before the S3 server from now on."""
    import s3fs

    proxies = []

    def put(choose):
        proxy = FlakyProxy(os.environ["AWS_ENDPOINT_URL"], choose)
        proxies.append(proxy)
        proxy.__enter__()
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3fs.S3FileSystem.clear_instance_cache()
        return proxy

    yield put
    for proxy in proxies:
        proxy.__exit__()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "hang up"])
def test_faults_now_and_then_change_nothing(repository, remote, source, flaky, fault):
    where, options = source
    ingest(repository, str(where), "pets", **options)
    uploaded = upload(where, f"{remote}/source")
    proxy = flaky(lambda number, *_: fault if number % 7 == 0 else None)
    there = Repository.create(f"{remote}/repo")
    ingest(there, uploaded, "pets", **options)
    assert proxy.faults > 3
    assert digests(there, "pets") == digests(repository, "pets")


@pytest.mark.slow
def test_answers_cut_short_are_never_ingested(repository, remote, source, flaky):
    where, options = source
    ingest(repository, str(where), "pets", **options)
    uploaded = upload(where, f"{remote}/source")
    there = Repository.create(f"{remote}/repo")
    proxy = flaky(
        lambda number, method, path: "truncate" if method == "GET" and "source" in path and number % 5 == 0 else None
    )
    try:
        ingest(there, uploaded, "pets", **options)
    except UnavailableError:
        assert there.names("datasets") == []
    else:
        assert digests(there, "pets") == digests(repository, "pets")
    assert proxy.faults


@pytest.mark.slow
def test_a_store_that_fails_leaves_no_version_and_the_next_ingest_continues(
    repository, remote, source, flaky, monkeypatch
):
    where, options = source
    ingest(repository, str(where), "pets", **options)
    there = Repository.create(f"{remote}/repo")
    healthy = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore; s3fs tries five times
    flaky(lambda number, method, path: "503" if method in {"PUT", "POST"} and number > 12 else None)
    with pytest.raises(UnavailableError, match=r"cannot (write|create)"):
        ingest(Repository.open(there.url), str(where), "pets", **options)
    monkeypatch.setenv("AWS_ENDPOINT_URL", healthy)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    again = Repository.open(there.url)
    assert again.names("datasets") == []
    ingest(again, str(where), "pets", **options)
    assert digests(again, "pets") == digests(repository, "pets")


@pytest.mark.slow
def test_credentials_are_in_no_file_of_the_repository(remote, folder):
    there = Repository.create(f"{remote}/repo")
    ingest(there, upload(folder, f"{remote}/source"), "pets")
    file_system, root = fsspec.url_to_fs(there.url)
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    assert all(secret not in file_system.cat_file(path) for path in file_system.find(root))


class RefusingHandler(BaseHTTPRequestHandler):
    """Answers as S3 does where a signature is wrong; some stand-ins accept any credentials."""

    def refuse(self):
        body = b"<Error><Code>SignatureDoesNotMatch</Code><Message>It does not match.</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_GET = do_HEAD = refuse  # noqa: N815 - the names of the handler's interface

    def log_message(self, *_):
        pass


def test_credentials_are_in_no_message(monkeypatch):
    import s3fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-never-shown")
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            with pytest.raises(DatasvcError) as caught:
                Repository.open("s3://bucket/repo")
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.shutdown()
    assert "s3://bucket/repo" in str(caught.value)
    assert "wrong-and-never-shown" not in str(caught.value)


def test_the_signature_of_a_web_address_stands_nowhere(repository, tmp_path):
    (tmp_path / "table.csv").write_text("a\n1\n2\n", encoding="utf-8")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/table.csv?sig=NOTFORYOU"
        ingest(repository, url, "table", source_options=SourceOptions(format="csv"))
        server.shutdown()
    split = open_dataset(repository, "table")["train"]
    assert [sample["a"] for sample in split] in ([1, 2], [2, 1])
    assert all(b"NOTFORYOU" not in path.read_bytes() for path in Path(repository.url).rglob("*") if path.is_file())
