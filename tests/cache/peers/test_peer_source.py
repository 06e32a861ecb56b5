"""The head of an answer has a deadline, however often a byte of it arrives."""

import http.client
import socket
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest

from datasvc.cache.peers import peer_source
from datasvc.cache.peers.peer_source import read_head
from tests.support.dripping_server import HEAD, DrippingServer


@pytest.fixture
def dripping():
    with DrippingServer() as server:
        yield server


@pytest.fixture(autouse=True)
def fast_clock(monkeypatch):
    """Let a second pass at each reading of the clock."""
    monkeypatch.setattr(peer_source, "time", SimpleNamespace(monotonic=count().__next__))


@contextmanager
def requested(address):
    connection = http.client.HTTPConnection(*address[:2])
    connection.request("GET", "/")
    yield connection
    connection.close()


def test_a_head_that_drips_is_given_up_at_its_deadline(dripping):
    with requested(dripping.address) as connection, pytest.raises(TimeoutError, match="a whole head within 5 s"):
        read_head(connection, silence_s=600, head_s=5)


def test_after_its_head_an_answer_is_read_as_before():
    with socket.create_server(("127.0.0.1", 0)) as listener, requested(listener.getsockname()) as connection:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(4096)
            accepted.sendall(HEAD + b"\r\nbo")
            response = read_head(connection, silence_s=7)
            assert connection.sock.gettimeout() == 7
            accepted.sendall(b"dy")
            assert response.read() == b"body"
