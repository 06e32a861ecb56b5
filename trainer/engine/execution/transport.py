"""How bytes and tensors get from rank to rank: over torch.distributed, or nowhere in a world of one.

The control group carries requests, the data groups tensors, one for each process set, so neither waits behind the
user's own collectives. Every method but `wire_device` and `close` is a collective of the set: all its ranks call
them in the same order, from the engine's thread.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from datasvc.trainer.engine.negotiation.requests import GLOBAL_SET, ReduceOp
from datasvc.trainer.env.engine_settings import EngineSettings

logger = logging.getLogger(__name__)

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


class CollectiveWork(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Returns when it is done; on CUDA when the current stream will wait for it. Raises RuntimeError."""


class Transport(Protocol):
    """What the engine needs of a network. Any exception means that the job is lost.

    Tensors are flat and contiguous; `process_set` is a number; ranks in arguments are global.
    """

    rank: int
    size: int
    local_size: int
    is_homogeneous: bool

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's data, in rank order. Lengths may differ."""

    def wire_device(self, device: torch.device) -> torch.device:
        """Where tensors of this device must lie to be sent."""

    def add_process_set(self, process_set: int, ranks: Sequence[int]) -> None:
        """Makes a set known. All ranks call this, whether in the set or not."""

    def remove_process_set(self, process_set: int) -> None:
        """Forgets a set. All ranks call this."""

    def begin_allreduce(self, tensor: Tensor, op: ReduceOp, process_set: int) -> CollectiveWork:
        """Begins to reduce in place; AVERAGE only sums."""

    def allgather(self, outputs: list[Tensor], tensor: Tensor, process_set: int) -> None:
        """Fills one output per rank of the set; all have the shape and dtype of `tensor`."""

    def broadcast(self, tensor: Tensor, root_rank: int, process_set: int) -> None:
        """Overwrites a tensor with the root's."""

    def alltoall(
        self, received: Tensor, sent: Tensor, received_lengths: list[int], sent_lengths: list[int], process_set: int
    ) -> None:
        """Sends one part to each rank of the set and receives one from each; lengths in elements."""

    def reducescatter(self, output: Tensor, inputs: list[Tensor], process_set: int) -> None:
        """Sums input i of all ranks into the output of rank i of the set; lengths may differ."""

    def swap(self, received: Tensor, sent: Tensor, partner: int, process_set: int) -> None:
        """Sends to the partner what it sends back."""

    def close(self) -> None:
        """Lets go of the network. Ranks that still wait for this one get an error."""


class ExchangeStep(NamedTuple):
    """A step of an exchange: one rank's first parts go to another, and those of a third come behind what it holds.

    Attributes:
        target: rank that is sent to.
        source: rank that sends.
        held: parts that this rank has before.
        num_parts: that are sent, and that come.
    """

    target: int
    source: int
    held: int
    num_parts: int


def plan_exchange(rank: int, size: int) -> list[ExchangeStep]:
    """Plans how every rank gets one part of each: it starts with its own, and ends with those of the ranks behind it.

    What a rank holds doubles in each round: Bruck et al., "Efficient algorithms for all-to-all communications in
    multiport message-passing systems", 1997.
    """
    rounds, held = [], 1
    while held < size:
        num_parts = min(held, size - held)
        rounds.append(ExchangeStep((rank - held) % size, (rank + held) % size, held, num_parts))
        held += num_parts
    return rounds


class CompletedWork:
    """Work that is over."""

    def wait(self) -> None:
        """Returns at once."""


class LoopbackTransport:
    """A world of one: no network."""

    rank = 0
    size = 1
    local_size = 1
    is_homogeneous = True

    def exchange(self, data: bytes) -> list[bytes]:
        """Its own data."""
        return [data]

    def wire_device(self, device: torch.device) -> torch.device:
        """The device itself."""
        return device

    def add_process_set(self, process_set: int, ranks: Sequence[int]) -> None:
        """Does nothing."""

    def remove_process_set(self, process_set: int) -> None:
        """Does nothing."""

    def begin_allreduce(self, tensor: Tensor, op: ReduceOp, process_set: int) -> CollectiveWork:  # noqa: ARG002 - as Transport
        """Leaves the tensor as it is."""
        return CompletedWork()

    def allgather(self, outputs: list[Tensor], tensor: Tensor, process_set: int) -> None:  # noqa: ARG002 - as Transport
        """Copies the tensor."""
        outputs[0].copy_(tensor)

    def broadcast(self, tensor: Tensor, root_rank: int, process_set: int) -> None:
        """Leaves the tensor as it is."""

    def alltoall(
        self,
        received: Tensor,
        sent: Tensor,
        received_lengths: list[int],  # noqa: ARG002 - as Transport
        sent_lengths: list[int],  # noqa: ARG002 - as Transport
        process_set: int,  # noqa: ARG002 - as Transport
    ) -> None:
        """Copies the tensor."""
        received.copy_(sent)

    def reducescatter(self, output: Tensor, inputs: list[Tensor], process_set: int) -> None:  # noqa: ARG002 - likewise
        """Copies the tensor."""
        output.copy_(inputs[0])

    def swap(self, received: Tensor, sent: Tensor, partner: int, process_set: int) -> None:  # noqa: ARG002 - likewise
        """There is no partner."""
        raise AssertionError("a world of one has no partner")

    def close(self) -> None:
        """Does nothing."""


class GroupTransport:
    """New groups beside the default process group, which must exist. Every rank constructs one.

    Args:
        settings: of this rank.
        gpu: what names the GPU of this rank among all; empty without. NCCL refuses two ranks on one GPU, so CUDA
            tensors travel over NCCL if every rank has its own, else through host memory over gloo.
        local_size: ranks on this node.
        timeout_s: seconds after which an unanswered collective is an error; None: as the settings have it.

    Attributes:
        settings: rank 0's, which hold for all: different ones would make different buffers of the same operations.
        local_size: ranks on each node; 1 where nodes differ.
        is_homogeneous: whether all nodes have equally many ranks.
    """

    def __init__(
        self, settings: EngineSettings, *, gpu: str, local_size: int, timeout_s: float | None = None
    ) -> None:
        self._timeout = dt.timedelta(seconds=timeout_s or settings.timeout_s)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # This rank's first, then those of the ranks behind it.
        self._slots = bytearray(_SLOT_BYTES * self.size)
        self._slot_tensor = torch.frombuffer(self._slots, dtype=torch.uint8)
        self._rounds = plan_exchange(self.rank, self.size)
        self._control: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=self._timeout)
        mine = json.dumps([gpu, local_size, asdict(settings)]).encode()
        facts = [json.loads(data) for data in self.exchange(mine)]
        self.settings = EngineSettings(**facts[0][2])
        if self.settings != settings:
            logger.warning("rank %d takes the engine's settings from rank 0: they differ", self.rank)
        self._uses_nccl = len({each for each, _, _ in facts if each}) == self.size
        self.is_homogeneous = all(each == local_size for _, each, _ in facts)
        self.local_size = local_size if self.is_homogeneous else 1
        self._groups: dict[int, dist.ProcessGroup] = {}
        self.add_process_set(GLOBAL_SET, range(self.size))

    def exchange(self, data: bytes) -> list[bytes]:
        """Small messages to and from log2(ranks) others if all data fit their slots, a collective more if not."""
        slots = self._slots
        slots[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        beginning = data[: _SLOT_BYTES - _LENGTH_BYTES]
        slots[_LENGTH_BYTES : _LENGTH_BYTES + len(beginning)] = beginning
        assert self._control is not None
        # Not an all-gather: gloo hands each to a thread of its own, which takes longer than the exchange.
        for number, step in enumerate(self._rounds):
            sending = self._control.send([self._window(0, step.num_parts)], step.target, number)
            self._control.recv([self._window(step.held, step.num_parts)], step.source, number).wait()
            sending.wait()
        starts = [(rank - self.rank) % self.size * _SLOT_BYTES for rank in range(self.size)]
        lengths = [int.from_bytes(slots[start : start + _LENGTH_BYTES], "little") for start in starts]
        if max(lengths) > _SLOT_BYTES - _LENGTH_BYTES:
            return self._exchange_long(data, lengths)
        return [
            bytes(slots[start + _LENGTH_BYTES : start + _LENGTH_BYTES + length])
            for start, length in zip(starts, lengths, strict=True)
        ]

    def wire_device(self, device: torch.device) -> torch.device:
        """The device itself over NCCL, else the host."""
        return device if self._uses_nccl else torch.device("cpu")

    def add_process_set(self, process_set: int, ranks: Sequence[int]) -> None:
        """See `Transport`."""
        backend = "cpu:gloo,cuda:nccl" if self._uses_nccl else "gloo"
        group = dist.new_group(list(ranks), backend=backend, timeout=self._timeout)
        if self.rank in ranks:
            self._groups[process_set] = group

    def remove_process_set(self, process_set: int) -> None:
        """See `Transport`."""
        group = self._groups.pop(process_set, None)
        if group is not None:
            dist.destroy_process_group(group)

    def begin_allreduce(self, tensor: Tensor, op: ReduceOp, process_set: int) -> CollectiveWork:
        """See `Transport`."""
        work: CollectiveWork = dist.all_reduce(
            tensor, op=_REDUCE_OPS[op], group=self._groups[process_set], async_op=True
        )
        return work

    def allgather(self, outputs: list[Tensor], tensor: Tensor, process_set: int) -> None:
        """See `Transport`."""
        dist.all_gather(outputs, tensor, group=self._groups[process_set])

    def broadcast(self, tensor: Tensor, root_rank: int, process_set: int) -> None:
        """See `Transport`."""
        dist.broadcast(tensor, src=root_rank, group=self._groups[process_set])

    def alltoall(
        self, received: Tensor, sent: Tensor, received_lengths: list[int], sent_lengths: list[int], process_set: int
    ) -> None:
        """See `Transport`."""
        dist.all_to_all_single(received, sent, received_lengths, sent_lengths, group=self._groups[process_set])

    def reducescatter(self, output: Tensor, inputs: list[Tensor], process_set: int) -> None:
        """See `Transport`."""
        dist.reduce_scatter(output, inputs, group=self._groups[process_set])

    def swap(self, received: Tensor, sent: Tensor, partner: int, process_set: int) -> None:
        """See `Transport`."""
        group = self._groups[process_set]
        operations = [dist.P2POp(dist.isend, sent, partner, group), dist.P2POp(dist.irecv, received, partner, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def set_timeout(self, timeout_s: float) -> None:
        """Changes the seconds after which an unanswered collective is an error, the default group's too."""
        self._timeout = dt.timedelta(seconds=timeout_s)
        for group in (None, self._control, *self._groups.values()):
            _set_pg_timeout(self._timeout, group)

    def close(self) -> None:
        """Destroys the groups; the default group is not ours."""
        # The connections close when the last reference to a group goes, so none may stay behind here.
        groups, self._groups = [self._control, *self._groups.values()], {}
        self._control = None
        while groups:
            group = groups.pop()
            # The user may have destroyed the default group, and with it every other.
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def _window(self, start: int, count: int) -> Tensor:
        return self._slot_tensor[start * _SLOT_BYTES : (start + count) * _SLOT_BYTES]

    def _exchange_long(self, data: bytes, lengths: list[int]) -> list[bytes]:
        longest = max(lengths)
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(everyone, mine, group=self._control)
        return [tensor[:length].numpy().tobytes() for tensor, length in zip(everyone, lengths, strict=True)]
