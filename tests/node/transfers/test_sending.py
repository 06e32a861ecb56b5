"""Long bodies: how streams share a cap, and what ends one that does not move."""

import asyncio
import socket
import threading
from contextlib import suppress

from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from datasvc.node.transfers.sending import Sender, plan_streams

_MIB = 1 << 20


@given(rate=st.integers(1, 1 << 40))
def test_below_a_cap_no_stream_is_so_slow_that_a_peer_takes_it_for_stuck(rate):
    plan = plan_streams(rate)
    assert 1 <= plan.num_streams <= 32
    assert plan.num_streams == 1 or rate / plan.num_streams >= 2 * _MIB
    # All streams together write for a second at most before the first one has its turn again.
    assert plan.write_bytes == 64 << 10 or plan.num_streams * plan.write_bytes <= rate
    assert 64 << 10 <= plan.write_bytes <= 4 * _MIB


def test_without_a_cap_streams_write_4_mib():
    assert plan_streams(None).write_bytes == 4 * _MIB


class OneFile:
    """A server of one file, in a loop of its own."""

    def __init__(self, path, size_bytes, **options):
        self.counted = []
        self._sizes = path, size_bytes
        self._options = options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.sender = Sender(count=self.counted.append, **self._options)
        application = web.Application()
        application.add_routes([web.get("/", self._answer)])
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.address = runner.addresses[0]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()
        self.sender.close()

    async def _answer(self, request):
        path, size_bytes = self._sizes
        answer = web.StreamResponse()
        answer.content_length = size_bytes
        with path.open("rb") as file:
            async with self.sender.stream():
                await self.sender.send(request, answer, file.fileno(), 0, size_bytes)
        return answer

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def _read_all(connection):
    received = 0
    while piece := connection.recv(1 << 20):
        received += len(piece)
    return received


def test_a_reader_that_takes_nothing_is_cut_off(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * _MIB))
    server = OneFile(path, 64 * _MIB, stall_timeout_s=0.2)
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while not server.sender.sent.num_broken:
            pass
        with suppress(ConnectionResetError):
            assert _read_all(connection) < 64 * _MIB
    server.stop()
    assert server.sender.sent.num_objects == 0
    assert server.counted == [server.sender.sent.size_bytes]


def test_a_file_that_ends_too_early_breaks_the_answer(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * _MIB))
    server = OneFile(path, 9 * _MIB)
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with suppress(ConnectionResetError):
            assert _read_all(connection) <= 6 * _MIB
    server.stop()
    assert (server.sender.sent.num_broken, server.sender.sent.num_objects) == (1, 0)
