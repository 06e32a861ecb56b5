"""A link between two processes: a gloo group of two members, so that a lost process breaks only its own links."""

from __future__ import annotations

import datetime as dt
import io
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from datasvc.trainer.env.environment import RankPlacement, choose_gloo_interface
from datasvc.trainer.env.foreign_launchers import translate
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.messages import arrival_key

# A worker waits for the evaluation of the servers, however long it takes. A process that ends closes its connections.
_FOREVER = dt.timedelta(days=30)


def open_store(placement: RankPlacement) -> Store:
    """Return the store of the job, to which all its processes connect, and report this rank to the launcher."""
    os.environ.update(translate(os.environ))  # torch reads the variables of torchrun
    os.environ.update(choose_gloo_interface(os.environ))
    store, _, _ = next(rendezvous("env://"))
    store.set(arrival_key(placement.rank), "")
    assert isinstance(store, Store)
    return store


class ServerLink:
    """One end of a link. One thread at a time may use it.

    The constructor returns when both ends have called it.

    Args:
        store: store of the job.
        name: name of the link, the same at both ends.
        end: 0 at one end, 1 at the other.
        peer: name of the process at the other end, for errors.
        timeout_s: how long to wait for the other end; None: without a limit.

    Raises:
        HorovodInternalError: the other end did not come in time. All methods raise it too, if the other process is
            lost.
    """

    def __init__(self, store: Store, name: str, *, end: int, peer: str, timeout_s: float | None = None) -> None:
        self._peer, self._other = peer, 1 - end
        # A client of a store does one operation at a time, and this one may wait for long.
        own: Any = store
        store = PrefixStore(f"servers/{name}", own.clone())
        store.set(f"end/{end}", "")
        try:
            store.wait([f"end/{1 - end}"], _FOREVER if timeout_s is None else dt.timedelta(seconds=timeout_s))
            self._group: Any = dist.ProcessGroupGloo(store, end, 2, _FOREVER)
        except RuntimeError as error:
            raise HorovodInternalError(f"{peer} did not connect: {error}") from error

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor in host memory; nothing if it has no elements."""
        if tensor.numel():
            self._do(lambda: self._group.send([tensor], self._other, 0).wait())

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill a contiguous tensor of the size that the other end sends, and return it."""
        if tensor.numel():
            self._do(lambda: self._group.recv([tensor], self._other, 0).wait())
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
        self.send(torch.tensor([len(content)], device="cpu"))
        self.send(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _receive_bytes(self) -> bytes:
        size = int(self.receive(torch.zeros(1, dtype=torch.int64, device="cpu")))
        return self.receive(torch.empty(size, dtype=torch.uint8, device="cpu")).numpy().tobytes()

    def _do(self, operation: Any) -> None:
        try:
            operation()
        except RuntimeError as error:
            raise HorovodInternalError(f"{self._peer} is lost: {error}") from error
