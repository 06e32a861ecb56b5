"""Requests of obstore end by Ctrl-C, by a token and with the program; a forked child does without obstore."""

import asyncio
import atexit
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading

import pytest

from datasvc.repository import Storage
from datasvc.repository.store import obstore_loop
from datasvc.repository.store.obstore_loop import CancellationToken
from tests.repository.faulty_server import FaultyServer


async def answer():
    return 7


def test_a_request_returns_its_result_or_raises_its_exception():
    async def fail():
        raise FileNotFoundError("gone")

    assert obstore_loop.call(answer()) == 7
    with pytest.raises(FileNotFoundError, match="gone"):
        obstore_loop.call(fail())


def test_a_token_cancels_a_request_and_all_later_ones():
    begun, ended, token = threading.Event(), threading.Event(), CancellationToken()

    async def wait_for_ever():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def cancel():
        assert begun.wait(60)
        token.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(ConnectionError, match="the read was cancelled"):
        obstore_loop.call(wait_for_ever(), token)
    thread.join()
    assert ended.wait(60)
    with pytest.raises(ConnectionError, match="the read was cancelled"):
        obstore_loop.call(asyncio.sleep(600), token)


FORKING = """
import os, sys
from datasvc.repository import Storage
from datasvc.repository.store.obstore_loop import CancellationToken

storage, large = Storage(sys.argv[1]), bytearray()
storage.put_bytes("a", b"content")
assert storage.client == "obstore", storage.client
child = os.fork()
if child == 0:
    status = 1
    try:
        for each in (storage, Storage(sys.argv[1])):
            assert "forked" in each.client, each.client
            assert each.read("a") == b"content"
            each.stream_range("a", 0, 7, large.extend, CancellationToken())
        storage.create("b", bytes(large))
        status = 0
    finally:
        os._exit(status)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert storage.client == "obstore"
assert storage.read("b") == b"contentcontent"
sys.exit(status)
"""


@pytest.mark.slow
def test_a_forked_child_reads_and_writes_by_fsspec(s3_bucket):
    command = [sys.executable, "-c", FORKING, f"{s3_bucket}/{secrets.token_hex(8)}"]
    subprocess.run(command, check=True, timeout=120)


FORKING_EARLY = """
import os, sys
from datasvc.repository import Storage

storage = Storage(sys.argv[1])
child = os.fork()
if child == 0:
    os._exit(0 if storage.client == "obstore" and storage.read("a") == b"content" else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_before_the_first_request_uses_obstore(s3_bucket):
    url = f"{s3_bucket}/{secrets.token_hex(8)}"
    Storage(url).put_bytes("a", b"content")
    subprocess.run([sys.executable, "-c", FORKING_EARLY, url], check=True, timeout=120)


READING = """
import sys
from datasvc.repository import Storage

print("ready", flush=True)
try:
    Storage("s3://bucket").read("file")
except KeyboardInterrupt:
    sys.stdin.read()
    sys.exit(7)
"""


@pytest.fixture
def silent():
    """A server that accepts connections and answers nothing; it lets the first connection of a program through."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def run_against(server, program, *arguments):
    endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": endpoint}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env={**os.environ, **keys}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_ctrl_c_ends_a_request_that_is_not_answered(silent):
    with run_against(silent, READING) as program:
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(4) == b"GET "
            program.send_signal(signal.SIGINT)
            connection.settimeout(60)
            while connection.recv(4096):  # the rest of the request, then the end: the client has hung up
                pass
            program.stdin.close()
            assert program.wait(60) == 7


def test_ctrl_c_before_the_wait_for_a_request_ends_it_too(monkeypatch):
    began, has_ended = threading.Event(), threading.Event()

    async def request():
        try:
            began.set()
            await asyncio.sleep(600)
        finally:
            has_ended.set()

    def interrupted(run, start=obstore_loop.start):
        start(run)
        assert began.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(obstore_loop, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        obstore_loop.call(request())
    assert has_ended.wait(60)


ENDING = """
import sys, threading
from datasvc.repository import Storage
from datasvc.repository.store.obstore_loop import CancellationToken

def read():
    while True:
        Storage(sys.argv[1]).stream_range("file", 0, int(sys.argv[2]), take, CancellationToken())

def take(_view):
    arrived.set()

arrived = threading.Event()
for _ in range(8):
    threading.Thread(target=read, daemon=True).start()
arrived.wait()
"""


def test_a_program_ends_well_while_daemon_threads_read():
    content = bytes(20 << 20)
    with FaultyServer(content, "stall") as server:
        command = [sys.executable, "-c", ENDING, server.url, str(len(content))]
        assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False, timeout=120).returncode == 0


def test_the_exit_waits_until_obstore_has_ended_what_was_cancelled():
    """A thread of obstore that calls Python after the end of the interpreter aborts the process."""
    loop, ended, going = obstore_loop._ObstoreLoop(), [], threading.Event()
    requested: queue.SimpleQueue[asyncio.Future] = queue.SimpleQueue()

    async def request():
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _future: going.set())
        requested.put(future)
        await future

    def obstore():
        future = requested.get()
        assert going.wait(60)  # it is cancelled
        ended.append("obstore")
        assert future.cancelled()

    def end():
        loop._end()
        ended.append("exit")

    loop.submit(request())
    threads = [threading.Thread(target=obstore), threading.Thread(target=end)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert ended == ["obstore", "exit"]
    with pytest.raises(ConnectionError, match="the program is ending"):
        loop.submit(answer())
    atexit.unregister(loop._end)


SHORT = """
import sys
from datasvc.repository import Storage
from datasvc.repository.store.obstore_loop import CancellationToken

Storage(sys.argv[1]).stream_range("file", 0, 1000, len, CancellationToken())
"""


@pytest.mark.slow
def test_programs_end_well_right_after_a_request():
    """The thread of obstore that has set the result of the request may still run Python."""
    with FaultyServer(bytes(1000)) as server:
        command = [sys.executable, "-c", SHORT, server.url]
        for _ in range(4):
            programs = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(6)]
            assert [program.wait(120) for program in programs] == [0] * 6
