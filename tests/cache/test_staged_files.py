"""Ordinary files by their URLs: plain paths, counted and verified like everything in a cache."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from datasvc.cache import Cache
from datasvc.cache.records import footprint
from datasvc.cache.staged_files import stage_files
from datasvc.cli.main import app
from datasvc.errors import CacheFullError, ConfigError, NotFoundError, SourceChangedError


class Ranged(SimpleHTTPRequestHandler):
    """Serves files by ranges, as object stores do, and counts what it served."""

    def do_HEAD(self):
        content = self.content()
        if content is not None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            if self.server.says_state:
                self.send_header("ETag", f'"{hash(content)}"')
            self.end_headers()

    def do_GET(self):
        content = self.content()
        if content is None:
            return
        if self.server.before_answer is not None:
            self.server.before_answer()
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)
        self.server.num_bytes += len(part)

    def content(self):
        try:
            return Path(self.translate_path(self.path)).read_bytes()
        except OSError:
            self.send_error(404)

    def log_message(self, *_words):
        pass


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranged, directory=str(folder)))
    server.num_bytes, server.says_state, server.before_answer = 0, True, None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}", server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cache(tmp_path):
    with Cache(tmp_path / "cache", budget="64MB") as opened:
        yield opened


def test_a_file_comes_out_as_a_path_with_its_own_name_and_is_fetched_once(site, cache):
    folder, url, server = site
    content = bytes(range(256)) * 40_000  # more than one request
    (folder / "model v1.bin").write_bytes(content)
    (first,) = stage_files(cache, [f"{url}/model%20v1.bin"])
    assert (first.path.name, first.path.read_bytes(), first.outcome) == ("model v1.bin", content, "origin")
    served = server.num_bytes
    (second,) = stage_files(cache, [f"{url}/model%20v1.bin"])
    assert (second.path, second.outcome) == (first.path, "resident")
    assert server.num_bytes - served < len(content)
    assert cache.status().resident_bytes == footprint(len(content))


def test_two_files_of_one_name_are_two_files(site, cache):
    folder, url, _ = site
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "labels.txt").write_text(name)
    staged = stage_files(cache, [f"{url}/a/labels.txt", f"{url}/b/labels.txt"])
    assert [each.path.read_text() for each in staged] == ["a", "b"]


def test_a_file_that_changed_is_fetched_again(site, cache):
    folder, url, _ = site
    (folder / "x").write_bytes(b"old")
    old = stage_files(cache, [f"{url}/x"])[0].path
    (folder / "x").write_bytes(b"new")
    new = stage_files(cache, [f"{url}/x"])[0].path
    assert (old.read_bytes(), new.read_bytes()) == (b"old", b"new")


def test_a_file_that_changes_while_it_is_read_is_refused_and_not_kept(site, cache):
    folder, url, server = site
    path = folder / "x"
    first, second = b"1" * 300, b"2" * 300

    def change():
        path.write_bytes(second)
        server.before_answer = None

    path.write_bytes(first)
    server.before_answer = change
    with pytest.raises(SourceChangedError, match="changed while"):
        stage_files(cache, [f"{url}/x"])
    path.write_bytes(first)
    assert stage_files(cache, [f"{url}/x"])[0].path.read_bytes() == first


def test_a_store_that_says_nothing_of_a_file_s_state_is_refused(site, cache):
    folder, url, server = site
    (folder / "x").write_bytes(b"1")
    server.says_state = False
    with pytest.raises(ConfigError, match="neither a checksum nor a time"):
        stage_files(cache, [f"{url}/x"])


def test_a_scrub_finds_a_changed_staged_file_and_leaves_a_sound_one(site, cache):
    folder, url, _ = site
    for name in ("bad", "good"):
        (folder / name).write_bytes(name.encode() * 100)
    bad, good = (each.path for each in stage_files(cache, [f"{url}/bad", f"{url}/good"]))
    assert cache.scrub().corrupt == ()
    bad.resolve().write_bytes(b"x" * 300)
    assert len(cache.scrub().corrupt) == 1
    assert good.exists()
    assert stage_files(cache, [f"{url}/bad"])[0].path.read_bytes() == b"bad" * 100


def test_staged_files_keep_to_the_budget_and_leave_no_name_behind(site, tmp_path):
    folder, url, _ = site
    for number in range(6):
        (folder / str(number)).write_bytes(bytes([number]) * 4096)
    with Cache(tmp_path / "small", budget=3 * 4096) as cache:
        for number in range(6):
            stage_files(cache, [f"{url}/{number}"])
        assert cache.status().num_resident == 3
        assert len(list((cache.folder / "links").iterdir())) == 3
        with pytest.raises(CacheFullError):
            stage_files(cache, [f"{url}/{number}" for number in range(6)])


def test_what_is_no_file_is_refused_by_its_name(site, cache):
    _, url, _ = site
    with pytest.raises(NotFoundError, match="nothing-here"):
        stage_files(cache, [f"{url}/nothing-here"])
    with pytest.raises(ConfigError, match="no file"):
        stage_files(cache, [f"file://{cache.folder}"])


def test_the_command_prints_paths_in_the_order_of_the_urls(site, tmp_path):
    folder, url, _ = site
    for name in ("one", "two"):
        (folder / name).write_text(name)
    words = ["stage", f"{url}/two", f"{url}/one", "--cache", str(tmp_path / "cache"), "--budget", "1MB"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert [Path(line).read_text() for line in result.stdout.split()] == ["two", "one"]
