"""The server of `datasvc.trainer.run`: it sends the ranks the function to call, and collects their results.

It runs in the process of the launcher. A rank fetches the call, the pickled function with its arguments, and sends an
answer, which contains the result or the exception. Each connection carries one of these requests. Invariant: before
any pickle is read, both sides prove by the challenge of `multiprocessing` that they have the key of the job. The data
is not encrypted, like all communication between ranks.

Any process can connect. So the proof of the key, the hello of a connection, has a deadline, and the number of hellos
at the same time is limited. Further connections, also those of ranks, wait in the queue of the kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from datasvc.trainer.function.pickling import CallResult

_CALL_REQUEST, _ANSWER_REQUEST = b"call", b"answer"
_HELLO_TIMEOUT_S = 10.0
_MAX_HELLOS = 64
_POLL_PERIOD_S = 0.05


class CallServer:
    """Sends a pickled call to the ranks, and collects their results and exceptions.

    Args:
        call: pickled function with its arguments.
        key: secret key of the job, with which both sides authenticate.
        for_other_hosts: whether to listen on all interfaces, or on the loopback interface only.
        hello_timeout_s: maximum duration of a hello, in seconds; then the connection is closed.
        max_hellos: maximum number of hellos at the same time.
    """

    def __init__(
        self,
        call: bytes,
        *,
        key: bytes,
        for_other_hosts: bool,
        hello_timeout_s: float = _HELLO_TIMEOUT_S,
        max_hellos: int = _MAX_HELLOS,
    ) -> None:
        self._call = call
        self._key = key
        self._lock = threading.Lock()
        self._answers: list[CallResult] = []
        self._server = _CallTcpServer(
            ("" if for_other_hosts else "127.0.0.1", 0),
            self._authenticate,
            self._serve,
            hello_timeout_s=hello_timeout_s,
            max_hellos=max_hellos,
        )

    @property
    def port(self) -> int:
        """The TCP port of the server."""
        return int(self._server.server_address[1])

    @property
    def results(self) -> list[CallResult]:
        """The results received so far, in rank order. Each process sends one result or exception."""
        # Only an exception has a text, its traceback.
        with self._lock:
            return sorted((answer for answer in self._answers if not answer.text), key=lambda answer: answer.rank)

    @property
    def errors(self) -> list[CallResult]:
        """The exceptions received so far, in the order of arrival."""
        with self._lock:
            return [answer for answer in self._answers if answer.text]

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Serve the ranks inside the block."""
        polling = {"poll_interval": _POLL_PERIOD_S}
        thread = threading.Thread(target=self._server.serve_forever, kwargs=polling, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.is_closing.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _authenticate(self, connection: Connection) -> None:
        """Check that the other side has the key. Raises AuthenticationError, OSError or EOFError: it has not."""
        deliver_challenge(connection, self._key)
        answer_challenge(connection, self._key)

    def _serve(self, connection: Connection) -> None:
        """Serve one request of a rank: the other side of `fetch_call` and `send_answer`."""
        if connection.recv_bytes() == _CALL_REQUEST:
            connection.send_bytes(self._call)
            return
        fields = json.loads(connection.recv_bytes())
        answer = CallResult(content=connection.recv_bytes() or None, **fields)
        with self._lock:
            self._answers.append(answer)
        # The rank waits for this confirmation before it exits.
        connection.send_bytes(b"")


def fetch_call(address: tuple[str, int], key: bytes) -> bytes:
    """Fetch the pickled call from the launcher.

    Raises:
        OSError: the launcher cannot be reached.
        multiprocessing.AuthenticationError: the launcher has another key.
    """
    with Client(address, authkey=key) as connection:
        connection.send_bytes(_CALL_REQUEST)
        return connection.recv_bytes()


def send_answer(address: tuple[str, int], key: bytes, answer: CallResult) -> None:
    """Send an answer to the launcher, and wait until the launcher has received it.

    Raises:
        OSError: the launcher cannot be reached.
        multiprocessing.AuthenticationError: the launcher has another key.
    """
    with Client(address, authkey=key) as connection:
        connection.send_bytes(_ANSWER_REQUEST)
        fields = dataclasses.asdict(answer)
        # A pickle is never empty, so no bytes mean that there is no content.
        content = fields.pop("content") or b""
        connection.send_bytes(json.dumps(fields).encode())
        connection.send_bytes(content)
        connection.recv_bytes()


class _CallTcpServer(socketserver.ThreadingTCPServer):
    """Accepts connections, and passes each one to `authenticate` and then to `serve`, in a thread of its own."""

    # A client that connects and sends nothing must not delay the end of the job.
    daemon_threads = True
    block_on_close = False
    # All ranks may connect at the same time.
    request_queue_size = 1024

    def __init__(
        self,
        address: tuple[str, int],
        authenticate: Callable[[Connection], None],
        serve: Callable[[Connection], None],
        *,
        hello_timeout_s: float,
        max_hellos: int,
    ) -> None:
        self.authenticate = authenticate
        self.serve = serve
        self.hello_timeout_s = hello_timeout_s
        self.hellos = threading.Semaphore(max_hellos)
        self.is_closing = threading.Event()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection, as soon as there are fewer than `max_hellos` hellos."""
        while not self.hellos.acquire(timeout=_POLL_PERIOD_S):
            if self.is_closing.is_set():
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.hellos.release()  # otherwise the thread does this, in `limiting_hello`
            raise

    @contextlib.contextmanager
    def limiting_hello(self, request: socket.socket) -> Iterator[None]:
        """Shut the connection down if the block does not end in time; reads in the block then fail."""

        def end() -> None:
            # The other side may have closed it already.
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

        # One deadline for the whole block: with a timeout for each read, a client could send single bytes forever.
        timer = threading.Timer(self.hello_timeout_s, end)
        timer.daemon = True
        try:
            timer.start()
            yield
        finally:
            timer.cancel()
            self.hellos.release()


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _CallTcpServer)
        # An error means that a client lacks the key, or that a rank has died. Ignore both here, because the launcher
        # reports the death of a rank.
        with contextlib.suppress(OSError, EOFError, AuthenticationError), contextlib.ExitStack() as stack:
            hello = stack.enter_context(contextlib.ExitStack())
            hello.enter_context(self.server.limiting_hello(self.request))
            # `Connection` closes its file descriptor, and socketserver closes the one of `request`.
            connection = stack.enter_context(Connection(os.dup(self.request.fileno())))
            self.server.authenticate(connection)
            hello.close()  # ends the deadline, and permits another hello
            self.server.serve(connection)
