"""A link between two processes: a TCP connection of its own, so that a lost process breaks only its own links.

gloo has no way to end an operation that waits for a process which is stopped; a socket has one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from datasvc.trainer.env.environment import RankPlacement, choose_gloo_interface
from datasvc.trainer.env.foreign_launchers import translate
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.launch.ranks.store import LOOPBACK, list_addresses
from datasvc.trainer.rendezvous.messages import arrival_key

# A worker waits for the evaluation of the servers, however long it takes. A process that ends closes its connections.
_FOREVER: Final = dt.timedelta(days=30)
_CONNECT_S: Final = 10.0  # time in which one address answers


def open_store(placement: RankPlacement) -> Store:
    """Return the store of the job, to which all its processes connect, and report this rank to the launcher."""
    os.environ.update(translate(os.environ))  # torch reads the variables of torchrun
    os.environ.update(choose_gloo_interface(os.environ))
    store, _, _ = next(rendezvous("env://"))
    store.set(arrival_key(placement.rank), "")
    assert isinstance(store, Store)
    return store


class ServerLink:
    """One end of a link. One thread at a time may use it, and any other one may call `abort`.

    The constructor returns when both ends have called it. End 0 listens, and end 1 connects to it.

    Args:
        store: store of the job.
        name: name of the link, the same at both ends.
        end: 0 at one end, 1 at the other.
        peer: name of the process at the other end, for errors.
        timeout_s: how long to wait for the other end; None: without a limit.
        explain: returns a better message for an error of the connection; empty: there is none.

    Raises:
        HorovodInternalError: the other end did not come in time. All methods raise it too, if the other process is
            lost.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        end: int,
        peer: str,
        timeout_s: float | None = None,
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self._peer, self._explain = peer, explain
        # A client of a store does one operation at a time, and this one may wait for long.
        own: Any = store
        store = PrefixStore(f"servers/{name}", own.clone())
        try:
            self._socket = _accept(store, timeout_s) if end == 0 else _connect(store, timeout_s)
        except (RuntimeError, OSError) as error:
            raise HorovodInternalError(f"{peer} did not connect: {error}") from error
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def abort(self, reason: str) -> None:
        """Close the connection: all methods, also one that waits, raise `HorovodInternalError` with this reason."""
        self._explain = lambda: reason
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor in host memory; nothing if it has no elements."""
        if tensor.numel():
            self._send(tensor.numpy().data.cast("B"))

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill a contiguous tensor of the size that the other end sends, and return it."""
        if tensor.numel():
            self._receive(tensor.numpy().data.cast("B"))
        return tensor

    def send_message(self, **message: Any) -> None:
        """Send JSON values."""
        self._send_bytes(json.dumps(message).encode())

    def receive_message(self) -> dict[str, Any]:
        """Return the next message."""
        message: dict[str, Any] = json.loads(self._receive_bytes())
        return message

    def send_state(self, state: Any) -> None:
        """Send tensors in dicts and lists, with numbers and texts."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self._send_bytes(buffer.getvalue())

    def receive_state(self) -> Any:
        """Return what the other end has sent with `send_state`."""
        return torch.load(io.BytesIO(self._receive_bytes()), weights_only=True)

    def _send_bytes(self, content: bytes) -> None:
        self._send(struct.pack("<Q", len(content)) + content)

    def _receive_bytes(self) -> bytearray:
        size = bytearray(8)
        self._receive(memoryview(size))
        content = bytearray(struct.unpack("<Q", size)[0])
        self._receive(memoryview(content))
        return content

    def _send(self, content: bytes | memoryview) -> None:
        try:
            self._socket.sendall(content)
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, content: memoryview) -> None:
        try:
            _fill(self._socket, content)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> HorovodInternalError:
        return HorovodInternalError(self._explain() or f"{self._peer} is lost: {error}")


def _fill(connection: socket.socket, content: memoryview) -> None:
    while content:
        if not (size := connection.recv_into(content)):
            raise ConnectionResetError("it has closed the connection")
        content = content[size:]


def _accept(store: Store, timeout_s: float | None) -> socket.socket:
    """Wait for the other end, which finds the addresses in the store; refuse connections without the secret there."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    secret = secrets.token_bytes(16)
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(timeout_s)
        port = listener.getsockname()[1]
        addresses = list_addresses([os.environ.get("MASTER_ADDR", LOOPBACK)], interfaces)
        store.set("address", json.dumps([[*addresses], port, secret.hex()]))
        while True:
            connection, _ = listener.accept()
            connection.settimeout(_CONNECT_S)
            with contextlib.suppress(OSError):
                received = bytearray(len(secret))
                _fill(connection, memoryview(received))
                if secrets.compare_digest(received, secret):
                    connection.sendall(b"\1")
                    return connection
            connection.close()


def _connect(store: Store, timeout_s: float | None) -> socket.socket:
    store.wait(["address"], _FOREVER if timeout_s is None else dt.timedelta(seconds=timeout_s))
    addresses, port, secret = json.loads(store.get("address"))
    failures = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), _CONNECT_S)
            connection.sendall(bytes.fromhex(secret))
            _fill(connection, memoryview(bytearray(1)))
        except OSError as error:
            failures.append(f"{address}:{port}: {error}")
        else:
            return connection
    raise OSError("; ".join(failures))
