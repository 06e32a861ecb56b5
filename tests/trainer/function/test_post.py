"""The server that ranks of ``datasvc.trainer.run`` ask and tell, over real sockets."""

import multiprocessing
import socket
import threading

import pytest

from datasvc.trainer.function.pickling import CallResult
from datasvc.trainer.function.post import CallServer, ask, tell

KEY = b"k" * 32


@pytest.fixture
def post():
    post = CallServer(b"the call", key=KEY, for_other_hosts=False)
    with post.open():
        yield post


def test_ranks_get_the_call_and_their_answers_are_kept(post):
    address = ("127.0.0.1", post.port)
    assert ask(address, KEY) == b"the call"
    large = bytes(range(256)) * (1 << 14)
    tell(address, KEY, CallResult(0, large))
    tell(address, KEY, CallResult(2, None, "Traceback"))
    tell(address, KEY, CallResult(1, b"error", "Traceback"))
    assert post.results == [CallResult(0, large)]
    assert [answer.rank for answer in post.errors] == [2, 1]


def test_a_stranger_gets_nothing_and_can_say_nothing(post):
    with pytest.raises(multiprocessing.AuthenticationError):
        ask(("127.0.0.1", post.port), b"wrong")
    with pytest.raises((multiprocessing.AuthenticationError, OSError, EOFError)):
        tell(("127.0.0.1", post.port), b"wrong", CallResult(0, b"evil"))
    assert post.results == []


def test_a_silent_connection_keeps_nobody_from_asking(post):
    with socket.create_connection(("127.0.0.1", post.port)):
        assert ask(("127.0.0.1", post.port), KEY) == b"the call"


def test_many_ranks_ask_at_once(post):
    calls = []
    threads = [threading.Thread(target=lambda: calls.append(ask(("127.0.0.1", post.port), KEY))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert calls == [b"the call"] * 32


def test_the_port_is_closed_after_use():
    post = CallServer(b"", key=KEY, for_other_hosts=False)
    with post.open():
        pass
    with pytest.raises(ConnectionRefusedError):
        ask(("127.0.0.1", post.port), KEY)
