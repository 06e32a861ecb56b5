"""Carries the call to the ranks and their answers back: a small server in the launcher, for holders of the job's key.

Each connection is one question. Both sides prove the key before a byte of pickle is read (`multiprocessing`'s
challenge); what follows is not encrypted, like all that ranks say to each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

from datasvc.trainer.function.pickling import CallResult

_ASK, _TELL = b"call", b"answer"


class CallServer:
    """The launcher's side.

    Args:
        call: what ranks get when they ask.
        key: what they must know.
        for_other_hosts: whether to listen on all interfaces, or on the loopback one only.
    """

    def __init__(self, call: bytes, *, key: bytes, for_other_hosts: bool) -> None:
        self._call = call
        self._key = key
        self._lock = threading.Lock()
        self._answers: list[CallResult] = []
        self._server = _CallHttpServer(("" if for_other_hosts else "127.0.0.1", 0), self._serve)

    @property
    def port(self) -> int:
        """Where ranks ask."""
        return int(self._server.server_address[1])

    @property
    def results(self) -> list[CallResult]:
        """The results that have come, in rank order: one from each process."""
        with self._lock:
            return sorted((answer for answer in self._answers if not answer.text), key=lambda answer: answer.rank)

    @property
    def errors(self) -> list[CallResult]:
        """The exceptions that have come, in their order."""
        with self._lock:
            return [answer for answer in self._answers if answer.text]

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While inside, ranks are served."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _serve(self, connection: Connection) -> None:
        deliver_challenge(connection, self._key)
        answer_challenge(connection, self._key)
        if connection.recv_bytes() == _ASK:
            connection.send_bytes(self._call)
            return
        head = json.loads(connection.recv_bytes())
        content = connection.recv_bytes() if head["has_content"] else None
        with self._lock:
            self._answers.append(CallResult(head["rank"], content, head["text"], head["worker"], head["has_left"]))
        connection.send_bytes(b"")


def ask(address: tuple[str, int], key: bytes) -> bytes:
    """The call, from a rank's side.

    Raises:
        OSError: the launcher is gone.
        multiprocessing.AuthenticationError: it has another key.
    """
    with Client(address, authkey=key) as connection:
        connection.send_bytes(_ASK)
        return connection.recv_bytes()


def tell(address: tuple[str, int], key: bytes, answer: CallResult) -> None:
    """Sends an answer; returns when the launcher has it.

    Raises:
        OSError: the launcher is gone.
        multiprocessing.AuthenticationError: it has another key.
    """
    with Client(address, authkey=key) as connection:
        connection.send_bytes(_TELL)
        head = {"rank": answer.rank, "text": answer.text, "worker": answer.worker, "has_left": answer.has_left}
        head["has_content"] = answer.content is not None
        connection.send_bytes(json.dumps(head).encode())
        if answer.content is not None:
            connection.send_bytes(answer.content)
        connection.recv_bytes()


class _CallHttpServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], serve: Callable[[Connection], None]) -> None:
        self.serve = serve
        super().__init__(address, _Handler)


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _CallHttpServer)
        # A stranger, or a rank that died while it spoke, is no answer; the end of its process tells the rest.
        with (
            contextlib.suppress(OSError, EOFError, AuthenticationError),
            Connection(os.dup(self.request.fileno())) as connection,
        ):
            self.server.serve(connection)
