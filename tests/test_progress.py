"""What is seen of work on many bytes, on a real terminal and on a pipe."""

import os

import pytest

from datasvc.progress import byte_progress
from tests.support.terminals import read_terminal


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")


def restore(stream):
    with byte_progress("restoring m@3", stream) as progress:
        progress.begin(2_000_000)
        progress.advance(500_000, source="origin")
        progress.advance(1_500_000, source="peer")


def test_a_terminal_sees_which_version_comes_and_how_much_of_it_is_there():
    leader, follower = os.openpty()
    with open(follower, "w") as stream:
        restore(stream)
    seen = read_terminal(leader)
    assert "restoring m@3" in seen
    assert "2.0/2.0 MB" in seen
    assert "origin 500" in seen
    assert "peers 1." in seen


def test_a_pipe_sees_nothing():
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        restore(stream)
    with open(reader) as stream:
        assert stream.read() == ""
