"""The server that ranks of ``datasvc.trainer.run`` ask and tell, over real sockets."""

import multiprocessing
import socket
import threading

import pytest

from datasvc.trainer.function.call_server import CallServer, fetch_call, send_answer
from datasvc.trainer.function.pickling import CallResult

KEY = b"k" * 32


@pytest.fixture
def server():
    server = CallServer(b"the call", key=KEY, for_other_hosts=False)
    with server.open():
        yield server


def test_ranks_get_the_call_and_their_answers_are_kept(server):
    address = ("127.0.0.1", server.port)
    assert fetch_call(address, KEY) == b"the call"
    large = bytes(range(256)) * (1 << 14)
    send_answer(address, KEY, CallResult(0, large))
    send_answer(address, KEY, CallResult(2, None, "Traceback"))
    send_answer(address, KEY, CallResult(1, b"error", "Traceback"))
    assert server.results == [CallResult(0, large)]
    assert [answer.rank for answer in server.errors] == [2, 1]


def test_a_stranger_gets_nothing_and_can_say_nothing(server):
    with pytest.raises(multiprocessing.AuthenticationError):
        fetch_call(("127.0.0.1", server.port), b"wrong")
    with pytest.raises((multiprocessing.AuthenticationError, OSError, EOFError)):
        send_answer(("127.0.0.1", server.port), b"wrong", CallResult(0, b"evil"))
    assert server.results == []


def test_a_silent_connection_keeps_nobody_from_asking(server):
    with socket.create_connection(("127.0.0.1", server.port)):
        assert fetch_call(("127.0.0.1", server.port), KEY) == b"the call"


def test_many_ranks_ask_at_once(server):
    calls = []
    threads = [
        threading.Thread(target=lambda: calls.append(fetch_call(("127.0.0.1", server.port), KEY))) for _ in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert calls == [b"the call"] * 32


def test_the_port_is_closed_after_use():
    server = CallServer(b"", key=KEY, for_other_hosts=False)
    with server.open():
        pass
    with pytest.raises(ConnectionRefusedError):
        fetch_call(("127.0.0.1", server.port), KEY)
