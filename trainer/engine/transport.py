"""How bytes and tensors get from rank to rank: over torch.distributed, or nowhere in a world of one.

The control group carries requests, the data group tensors, so neither waits behind the user's own
collectives. Every method but ``wire_device`` and ``close`` is a collective: all ranks call them in the same
order, from the engine's thread.
"""

import datetime as dt
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.engine.requests import ReduceOp

_LENGTH_BYTES = 4
_SLOT_BYTES = 512

_REDUCE_OPS = {
    # gloo cannot average integers; the engine divides afterwards.
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


class Transport(Protocol):
    """What the engine needs of a network. Any exception means that the job is lost."""

    rank: int
    size: int

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's data, in rank order. Lengths may differ."""

    def wire_device(self, device: torch.device) -> torch.device:
        """Where tensors of this device must lie to be sent."""

    def allreduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Reduces a flat contiguous tensor in place; AVERAGE only sums."""

    def allgather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        """Fills one output per rank; all have the shape and dtype of ``tensor``."""

    def broadcast(self, tensor: Tensor, root_rank: int) -> None:
        """Overwrites a flat contiguous tensor with the root's."""

    def close(self) -> None:
        """Lets go of the network. Ranks that still wait for this one get an error."""


class LoopbackTransport:
    """A world of one: no network."""

    rank = 0
    size = 1

    def exchange(self, data: bytes) -> list[bytes]:
        """Its own data."""
        return [data]

    def wire_device(self, device: torch.device) -> torch.device:
        """The device itself."""
        return device

    def allreduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Leaves the tensor as it is."""

    def allgather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        """Copies the tensor."""
        outputs[0].copy_(tensor)

    def broadcast(self, tensor: Tensor, root_rank: int) -> None:
        """Leaves the tensor as it is."""

    def close(self) -> None:
        """Does nothing."""


class GroupTransport:
    """Two new groups beside the default process group, which must exist. Every rank constructs one.

    Args:
        timeout_s: seconds after which an unanswered collective is an error.
        has_own_gpu: whether this rank may use a GPU alone. NCCL refuses two ranks on one GPU, so CUDA tensors
            travel over NCCL if every rank has its own, else through host memory over gloo.
    """

    def __init__(self, *, timeout_s: float, has_own_gpu: bool) -> None:
        timeout = dt.timedelta(seconds=timeout_s)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._slot = bytearray(_SLOT_BYTES)
        self._slots = bytearray(_SLOT_BYTES * self.size)
        self._slot_tensor = torch.frombuffer(self._slot, dtype=torch.uint8)
        self._slot_tensors = list(torch.split(torch.frombuffer(self._slots, dtype=torch.uint8), _SLOT_BYTES))
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self._uses_nccl = all(vote == b"own" for vote in self.exchange(b"own" if has_own_gpu else b"shared"))
        backend = "cpu:gloo,cuda:nccl" if self._uses_nccl else "gloo"
        self._data = dist.new_group(backend=backend, timeout=timeout)

    def exchange(self, data: bytes) -> list[bytes]:
        """One small collective if all data fit their slots, a second one if not."""
        self._slot[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        self._slot[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data[: _SLOT_BYTES - _LENGTH_BYTES]
        dist.all_gather(self._slot_tensors, self._slot_tensor, group=self._control)
        slots = [self._slots[start : start + _SLOT_BYTES] for start in range(0, len(self._slots), _SLOT_BYTES)]
        lengths = [int.from_bytes(slot[:_LENGTH_BYTES], "little") for slot in slots]
        if max(lengths) > _SLOT_BYTES - _LENGTH_BYTES:
            return self._exchange_long(data, lengths)
        return [bytes(s[_LENGTH_BYTES : _LENGTH_BYTES + length]) for s, length in zip(slots, lengths, strict=True)]

    def wire_device(self, device: torch.device) -> torch.device:
        """The device itself over NCCL, else the host."""
        return device if self._uses_nccl else torch.device("cpu")

    def allreduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """See ``Transport``."""
        dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=self._data)

    def allgather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        """See ``Transport``."""
        dist.all_gather(outputs, tensor, group=self._data)

    def broadcast(self, tensor: Tensor, root_rank: int) -> None:
        """See ``Transport``."""
        dist.broadcast(tensor, src=root_rank, group=self._data)

    def close(self) -> None:
        """Destroys both groups; the default group is not ours."""
        # The connections close when the last reference to a group goes, so none may stay behind here.
        for attribute in ("_control", "_data"):
            group = self.__dict__.pop(attribute, None)
            # The user may have destroyed the default group, and with it every other.
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def _exchange_long(self, data: bytes, lengths: list[int]) -> list[bytes]:
        longest = max(lengths)
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(everyone, mine, group=self._control)
        return [tensor[:length].numpy().tobytes() for tensor, length in zip(everyone, lengths, strict=True)]
