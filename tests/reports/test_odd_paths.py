"""Paths that no file can be at, and files that have no end, are errors with the path and the cause."""

import os
import socket

import pytest
import torch

from datasvc.models import save
from tests.cli.command import run
from tests.shards.written_versions import write_version


@pytest.fixture
def odd(tmp_path):
    """Paths by what is odd about them."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    return {
        "below a file": tmp_path / "file" / "x",
        "below a loop": tmp_path / "loop" / "x",
        "a loop": tmp_path / "loop",
        "a long name": tmp_path / ("n" * 300),
        "a long path": "/" + "/".join(["d" * 200] * 30),
        "a pipe": tmp_path / "pipe",
        "a socket": tmp_path / "socket",
        "an endless device": "/dev/zero",
    }


@pytest.mark.parametrize(
    "words",
    [
        "ingest PATH new --repo REPO",
        "export pets@1 PATH --repo REPO",
        "ls --repo PATH",
        "stage pets@1 --repo REPO --cache PATH",
        "cache status --cache PATH",
        "models attach cnn@1 PATH --repo REPO",
        "models import PATH new --repo REPO",
        "models export cnn@1 PATH --repo REPO",
        "models push cnn@1 --to PATH --repo REPO --create",
        "audit PATH",
        "gc --repo PATH",
    ],
)
def test_an_odd_path_is_an_error_that_names_it(words, odd, repository):
    """pypa/distutils#44: a path that is wrong ends in a traceback, in a raw error, or never."""
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "x"}]]})
    save(repository, "cnn", {"w": torch.ones(4)}, step=1)
    for kind, path in odd.items():
        if kind == "an endless device" and "export" in words:
            continue  # a device may be written to
        names = {"PATH": str(path), "REPO": repository.url}
        result = run(*(names.get(word, word) for word in words.split()))
        assert result.returncode in {1, 2, 3, 5}, (kind, result)
        assert "Traceback" not in result.stderr, kind
        assert not result.stderr.startswith("error: [Errno"), kind


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "an endless device"])
@pytest.mark.parametrize("command", ["attach", "import"])
def test_what_has_no_end_is_not_read(command, kind, odd, repository):
    """pypa/distutils#44: to open a pipe waits for its writer, and a device fills the disk."""
    save(repository, "cnn", {"w": torch.ones(4)}, step=1)
    words = ("attach", "cnn@1", odd[kind]) if command == "attach" else ("import", odd[kind], "new")
    result = run("models", *words, "--repo", repository.url)
    assert result.returncode == 2
    assert "is not a regular file" in result.stderr


@pytest.mark.parametrize(("kind", "cause"), [("a loop", "symbolic links"), ("a long name", "name too long")])
def test_a_repository_at_a_wrong_path_is_wrong_usage_and_not_a_store_that_is_down(kind, cause, odd):
    """pypa/distutils#44: a program that tries again on status 5 would do so for ever."""
    result = run("ls", "--repo", odd[kind])
    assert result.returncode == 2
    assert cause in result.stderr
    assert "Errno" not in result.stderr
