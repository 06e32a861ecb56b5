"""The server that ranks of ``datasvc.trainer.run`` ask and tell, over real sockets."""

import contextlib
import multiprocessing
import socket
import struct
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


def test_strangers_without_a_proof_are_few_at_a_time_and_their_connections_end():
    server = CallServer(b"the call", key=KEY, for_other_hosts=False, hello_timeout_s=0.05, max_hellos=2)
    with server.open(), contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        for connection in silent:
            connection.makefile("rb").read()  # returns, because the server closes the connection
        server._server.hello_timeout_s = 600  # a slow machine is no stranger
        assert fetch_call(address, KEY) == b"the call"


def test_single_bytes_do_not_hold_a_connection():
    server = CallServer(b"", key=KEY, for_other_hosts=False, hello_timeout_s=0.05)
    with server.open(), socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(struct.pack("!i", 200))  # the length of an answer, of which single bytes follow
        with pytest.raises(OSError):  # noqa: PT011 - a reset or a broken pipe
            while True:
                connection.sendall(b"x")


def test_the_end_of_the_job_does_not_wait_for_strangers():
    server = CallServer(b"", key=KEY, for_other_hosts=False, hello_timeout_s=600, max_hellos=2)
    others = set(threading.enumerate())  # those of servers of other tests among them
    with contextlib.ExitStack() as stack:
        with server.open():
            address = ("127.0.0.1", server.port)
            silent = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
            for connection in silent[:2]:
                assert connection.recv(1)  # the server has a thread for it, which sends the challenge
            threads = [each for each in set(threading.enumerate()) - others if "process_request_thread" in each.name]
            assert len(threads) == 2
        for connection in silent:
            connection.close()
        for thread in threads:
            thread.join(60)


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
