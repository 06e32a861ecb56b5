"""What a stranger sends to a server, or puts into a picture or a repository, takes no more than its share."""

import io
import shutil
import socket
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.node.http import connection_limit
from datasvc.node.http.auth import is_own_host
from datasvc.repository import Repository
from datasvc.shards.format.schema import image_schema
from datasvc.shards.images.header import Reencoding, check_and_reencode, read_header
from datasvc.shards.images.thumbnail import thumbnail
from datasvc.ui import server as ui_server
from tests.samples import jpeg
from tests.shards.written_versions import write_version
from tests.ui.conftest import running_ui


def _with_scans(num_scans, side=4096, *, between=b""):
    """Return a progressive JPEG in which one scan of all pixels, of some bytes, is repeated."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), 128).save(buffer, "JPEG", progressive=True)
    raw = buffer.getvalue()
    scan = raw[raw.rfind(b"\xff\xda") : -2]
    return raw[:-2] + (between + scan) * num_scans + raw[-2:]


@pytest.mark.parametrize(
    "between",
    [b"", b"\xff\xfe\x00\x04\xff\xd9", b"\xff\xfe\x00\x02\xff"],
    ids=["scans", "comments", "comments and fill bytes"],
)
@pytest.mark.parametrize("side", [4096, 1024])
def test_a_small_jpeg_of_many_scans_holds_no_decoder_for_minutes(between, side):
    """libjpeg-turbo/libjpeg-turbo#284, libjpeg-turbo/libjpeg-turbo#252, NVIDIA/DALI#5316: 38 kB take a minute."""
    hostile = _with_scans(4000, side, between=between)
    for read in (
        read_header,
        lambda raw: read_header(raw, decode=True),
        lambda raw: check_and_reencode(raw, Reencoding(max_side=64), decode=False),
        lambda raw: thumbnail(raw, 64),
    ):
        with pytest.raises(BadSampleError, match="scans or more"):
            read(hostile)


def test_an_ordinary_progressive_jpeg_is_intact_whatever_its_comments_have():
    """libjpeg-turbo/libjpeg-turbo#284: progressive files of some ten scans are usual, and no reason to refuse."""
    raw = _with_scans(8)
    many = b"\xff\xda\x00\x08" * 10000
    commented = raw[:2] + b"\xff\xfe" + (len(many) + 2).to_bytes(2, "big") + many + raw[2:]
    assert read_header(commented) == ("JPEG", 4096, 4096)
    assert thumbnail(commented, 64).size == (64, 64)


def test_a_repository_of_somebody_else_does_not_replace_the_pictures_of_mine(tmp_path):
    """data-accelerator/dart#6: bytes are cached under a digest that they were never compared with."""
    mine, theirs = Repository.create(str(tmp_path / "mine")), tmp_path / "theirs"
    sample = {"key": "a", "image": jpeg(), "width": 40, "height": 30}
    write_version(mine, "d", {"train": [[sample]]}, image_schema(labelled=False))
    shutil.copytree(tmp_path / "mine", theirs)
    for url in (theirs, tmp_path / "mine"):
        with running_ui(url, thumbnails=tmp_path / "t") as pages:
            urlopen(f"{pages.url}/datasets/d@1/samples/train/0/image/image").close()
    # Parts of a shard are compared with its index, which theirs may have made for a shard of my digest.
    assert len(list((tmp_path / "t").glob("*/*.jpg"))) == 2


@pytest.fixture
def pages(tmp_path):
    Repository.create(str(tmp_path / "repo"))
    with running_ui(tmp_path / "repo", thumbnails=tmp_path / "t") as server:
        yield server


def _connected(pages, opened):
    address = urlsplit(pages.url)
    return opened.enter_context(socket.create_connection((address.hostname, address.port)))


def test_a_connection_of_pages_that_sends_no_head_is_closed(pages, monkeypatch):
    """xorbitsai/inference#5213: a server waits for ever for a head, so slow clients take all its connections."""
    monkeypatch.setattr(connection_limit, "FIRST_HEAD_S", 0.01)
    with ExitStack() as opened:
        silent = _connected(pages, opened)
        silent.sendall(b"GET / HTTP/1.1\r\n")
        with suppress(ConnectionResetError):
            assert silent.recv(100) == b""


def test_pages_have_a_limit_of_connections(tmp_path, monkeypatch):
    """hyperium/hyper#2675: a server accepts connections until it has no files left."""
    monkeypatch.setattr(ui_server, "_MAX_CONNECTIONS", 2)
    Repository.create(str(tmp_path / "repo"))
    head = b"GET /api/datasets HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with running_ui(tmp_path / "repo") as pages, ExitStack() as opened:
        held = [_connected(pages, opened) for _ in range(2)]
        for connection in held:
            connection.sendall(head)
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
        further = _connected(pages, opened)
        further.sendall(head)
        assert further.recv(20).startswith(b"HTTP/1.1 503")


def test_a_stranger_without_the_token_holds_no_connection_of_pages(tmp_path):
    """xorbitsai/inference#5213: connections of clients that have no access stay open."""
    Repository.create(str(tmp_path / "repo"))
    with running_ui(tmp_path / "repo", token="0123456789abcdef") as pages, ExitStack() as opened:
        for path in ("/login", "/", "/static/drawing.css"):
            stranger = _connected(pages, opened)
            stranger.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            while stranger.recv(10000):
                pass


@pytest.mark.parametrize(
    ("header", "is_own"),
    [
        ("127.0.0.1:8765", True),
        ("localhost", True),
        ("[::1]:80", True),
        ("evil@127.0.0.1", False),
        ("evil.example:80@localhost", False),
        ("127.0.0.1/evil.example", False),
        ("127.0.0.1?.evil.example", False),
        ("localhost#.evil.example", False),
        ("127.0.0.1\\.evil.example", False),
    ],
)
def test_a_host_header_is_a_name_and_nothing_else(header, is_own):
    """modelcontextprotocol/typescript-sdk#2489: a parser of URLs leaves out what stands before `@`."""
    assert is_own_host(header, set()) is is_own
