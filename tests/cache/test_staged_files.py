"""Ordinary files by their URLs: plain paths, counted and verified like everything in a cache."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from datasvc.cache import Cache, process_handle
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.staged_files import stage_files
from datasvc.cli.main import make_app
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
        if self.server.gives is not None:  # whatever the path
            return self.server.gives
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
    server.num_bytes, server.says_state, server.before_answer, server.gives = 0, True, None, None
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
    with pytest.raises(ConfigError, match="neither a checksum nor a modification time"):
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


@pytest.mark.parametrize(
    "path",
    [
        "data/..%2F..%2F..%2F.bashrc",
        "data/%2e%2e",
        "data/%2e%2e%2F",
        "data/..",
        "data/.",
        "data%2F",
        "data/%2F",
        "",
        "data/a%00b",
        "data/a%0Ab",
        "data/.content",
        "data/%2Econtent",
        "data/.tmp-1",
        "data/" + "%C3%A4" * 128,
        "data/?x=/name",
        "data/#/name",
    ],
)
def test_a_url_that_names_no_plain_file_is_refused_before_a_byte_is_read(site, cache, path):
    _, url, server = site
    server.gives = b"foreign"
    with pytest.raises(ConfigError, match="not a valid file name"):
        stage_files(cache, [f"{url}/{path}"])
    assert server.num_bytes == 0
    assert not (cache.folder / "links").exists()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/..%2F..%2F..%2Fvictim", "victim"),
        ("data/%2e%2e%2F%2e%2e%2F%2e%2e%2Fvictim", "victim"),
        ("data/..%252F..%252F..%252Fvictim", None),
        ("data/x..%252Fvictim", "x..%2Fvictim"),  # unquoted once, as the server does
        ("data/x%5C..%5Cvictim", "x\\..\\victim"),  # an ordinary character here
        ("data/victim?x=../../y#/../z", "victim"),
        ("data/victim/", "victim"),  # fsspec asks for the path without the slash
        ("data/" + "a" * 255, "a" * 255),
    ],
)
def test_a_staged_file_lies_in_its_own_folder_whatever_its_url_says(site, cache, tmp_path, path, name):
    _, url, server = site
    (tmp_path / "victim").write_bytes(b"mine")
    server.gives = b"foreign"
    if name is None:
        with pytest.raises(ConfigError, match="not a valid file name"):
            stage_files(cache, [f"{url}/{path}"])
    else:
        (staged,) = stage_files(cache, [f"{url}/{path}"])
        assert (staged.path.name, staged.path.parent.parent) == (name, cache.folder / "links")
        assert staged.path.read_bytes() == b"foreign"
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert not (tmp_path / "victim").is_symlink()
    assert cache.scrub().corrupt == ()


def test_only_urls_of_http_are_unquoted(tmp_path, cache):
    (tmp_path / "a%2Fb#1").write_bytes(b"local")
    (staged,) = stage_files(cache, [f"{tmp_path}/a%2Fb#1"])
    assert (staged.path.name, staged.path.read_bytes()) == ("a%2Fb#1", b"local")


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_but_a_link_of_its_own_is_ever_given_out_or_replaced(site, cache, kind):
    folder, url, _ = site
    (folder / "x").write_bytes(b"x")
    path = stage_files(cache, [f"{url}/x"])[0].path
    path.unlink()
    {"file": lambda: path.write_bytes(b"?"), "folder": path.mkdir, "link": lambda: path.symlink_to("?")}[kind]()
    before = path.lstat()
    with pytest.raises(ConfigError, match="remove it, then stage"):
        stage_files(cache, [f"{url}/x"])
    assert path.lstat() == before
    path.rmdir() if kind == "folder" else path.unlink()
    assert stage_files(cache, [f"{url}/x"])[0].path.read_bytes() == b"x"


def test_a_digest_that_was_overwritten_costs_a_fetch_and_no_scrub(site, cache):
    folder, url, _ = site
    (folder / "x").write_bytes(b"x")
    path = stage_files(cache, [f"{url}/x"])[0].path
    content = path.parent / ".content"
    content.unlink()
    content.symlink_to(path)  # as a file called ".content" once did
    assert len(cache.scrub().corrupt) == 1
    assert stage_files(cache, [f"{url}/x"])[0].path.read_bytes() == b"x"
    assert cache.scrub().corrupt == ()


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
    with pytest.raises(ConfigError, match="is a folder or has no known size"):
        stage_files(cache, [f"file://{cache.folder}"])


def test_the_command_prints_paths_in_the_order_of_the_urls(site, tmp_path):
    folder, url, _ = site
    for name in ("one", "two"):
        (folder / name).write_text(name)
    words = ["stage", f"{url}/two", f"{url}/one", "--cache", str(tmp_path / "cache"), "--budget", "1MB"]
    result = CliRunner().invoke(make_app(), words)
    assert result.exit_code == 0, result.output
    assert [Path(line).read_text() for line in result.stdout.split()] == ["two", "one"]


def test_the_folder_of_a_cache_is_enough_and_is_closed_again(site, tmp_path):
    folder, url, server = site
    (folder / "a.bin").write_bytes(b"abc")
    Cache(tmp_path / "cache", budget="64MB").close()
    for place in (tmp_path / "cache", str(tmp_path / "cache")):
        (found,) = stage_files(place, [f"{url}/a.bin"])
        assert found.path.read_bytes() == b"abc"
        assert tmp_path / "cache" not in process_handle._folders
    assert server.num_bytes == 3
