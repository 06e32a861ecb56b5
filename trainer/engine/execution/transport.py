"""Transport of bytes and tensors between ranks: over torch.distributed, or without a network for one rank.

A group is a process group of torch. The control group carries requests; one data group per process set carries
tensors. The user's own collectives are in other groups, so the engine does not wait for them. Every method except
`wire_device`, `set_timeout` and `close` is a collective: all ranks of the process set call it in the same order, from
the engine's thread. `combine`, `exchange` and the changes of process sets are collectives of all ranks of the job.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from datasvc.trainer.engine.execution.wire import as_bytes
from datasvc.trainer.engine.negotiation.requests import GLOBAL_SET, ReduceOp
from datasvc.trainer.env.environment import EngineSettings

logger = logging.getLogger(__name__)

# Each rank has a slot of fixed size, so that an exchange of short data needs no message about lengths. A slot begins
# with the length of the rank's data.
_LENGTH_BYTES = 4
_SLOT_BYTES = 512

# Adasum is missing, because `Reductions` computes it from swaps.
_REDUCE_OPS = {
    # gloo cannot average integers; the engine divides afterwards.
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


# torch 2.13 renamed these functions; their old names issue a FutureWarning.
_reduce_scatter: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveWork(Protocol):
    """A collective that has begun."""

    def wait(self) -> object:
        """Wait until it is done; on CUDA, make the current stream wait for it.

        Raises:
            RuntimeError: the collective failed.
        """


class CompletedWork:
    """A collective that is complete."""

    def wait(self) -> None:
        """Return at once."""


class Transport:
    """The network interface of the engine; this class is the transport of a job with one rank, without a network.

    Any exception of a method ends the job. Tensors are flat and contiguous; `process_set` is the number of a set;
    ranks in arguments are global.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    is_homogeneous: bool = True
    has_node_groups: bool = False

    def combine(self, data: bytes) -> bytes:
        """Return the bitwise AND of the data of all ranks, which have one length."""
        return data

    def exchange(self, data: bytes) -> list[bytes]:
        """Send data to all ranks, and return the data of all ranks in rank order. Lengths may differ."""
        return [data]

    def wire_device(self, device: torch.device) -> torch.device:
        """Return the device from which tensors on `device` are sent; a tensor is copied there if it differs."""
        return device

    def add_process_set(self, process_set: int, ranks: Sequence[int]) -> None:
        """Create the group of a process set. All ranks call this, also those outside the set."""

    def remove_process_set(self, process_set: int) -> None:
        """Destroy the group of a process set. All ranks call this."""

    def begin_allreduce(self, tensor: Tensor, op: ReduceOp, process_set: int) -> CollectiveWork:  # noqa: ARG002 - one rank
        """Begin to reduce a tensor in place; AVERAGE only sums, because the engine divides afterwards."""
        return CompletedWork()

    def begin_hierarchical_allreduce(self, tensor: Tensor, scratch: Tensor) -> CollectiveWork:  # noqa: ARG002 - one rank
        """Begin to sum a tensor in place over all ranks, node by node; see `HierarchicalWork` for the arguments."""
        raise AssertionError("this transport has no node groups")

    def allgather(self, outputs: list[Tensor], tensor: Tensor, process_set: int) -> None:  # noqa: ARG002 - one rank
        """Fill one output per rank of the set; all have the shape and dtype of `tensor`."""
        outputs[0].copy_(tensor)

    def broadcast(self, tensor: Tensor, root_rank: int, process_set: int) -> None:
        """Overwrite a tensor with the tensor of the root rank."""

    def alltoall(
        self,
        received: Tensor,
        sent: Tensor,
        received_lengths: list[int],  # noqa: ARG002 - one rank
        sent_lengths: list[int],  # noqa: ARG002 - one rank
        process_set: int,  # noqa: ARG002 - one rank
    ) -> None:
        """Send one part to each rank of the set, and receive one part from each.

        The parts of `sent` and `received` are adjacent, in rank order; their lengths are in elements.
        """
        received.copy_(sent)

    def reducescatter(self, output: Tensor, inputs: list[Tensor], process_set: int) -> None:  # noqa: ARG002 - one rank
        """Sum input i of all ranks into the output of rank i of the set; lengths may differ."""
        output.copy_(inputs[0])

    def swap(self, received: Tensor, sent: Tensor, partner: int, process_set: int) -> None:  # noqa: ARG002 - one rank
        """Send a tensor to a partner, and overwrite `received` with the partner's tensor."""
        raise AssertionError("a job of one rank has no partner")

    def close(self) -> None:
        """Close the connections. Ranks that still wait for this one get an error."""


class ExchangeStep(NamedTuple):
    """One step of an exchange: send the first `num_parts` of the `held` parts, and append as many received ones."""

    target: int
    source: int
    held: int
    num_parts: int


def plan_exchange(rank: int, size: int) -> list[ExchangeStep]:
    """Plan the steps by which a rank collects the parts of all ranks: its own, then those of the ranks after it.

    The number of parts doubles in each step: Bruck et al., "Efficient algorithms for all-to-all communications in
    multiport message-passing systems", 1997.
    """
    steps, held = [], 1
    while held < size:
        num_parts = min(held, size - held)
        steps.append(ExchangeStep((rank - held) % size, (rank + held) % size, held, num_parts))
        held += num_parts
    return steps


class GroupTransport(Transport):
    """The transport over new groups of torch.distributed. Every rank constructs one; the default group must exist.

    Args:
        settings: settings of this rank; those of rank 0 are used, and are the attribute.
        gpu: unique name of the GPU of this rank; empty without one. NCCL rejects two ranks on one GPU, so CUDA
            tensors are sent over NCCL if every rank has a GPU of its own, otherwise through host memory over gloo.
        local_size: number of ranks on this node; the attribute is 1 if nodes differ.
        node: number of this node; None if each node has `local_size` ranks with adjacent numbers.
        timeout_s: seconds after which a collective fails if a rank does not answer; None for `settings.timeout_s`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        gpu: str,
        local_size: int,
        node: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._timeout = dt.timedelta(seconds=timeout_s or settings.timeout_s)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # The slot of this rank comes first, then the slots of the ranks after it; rank 0 follows the last rank.
        self._slots = bytearray(_SLOT_BYTES * self.size)
        self._slot_tensor = torch.frombuffer(self._slots, dtype=torch.uint8)
        self._steps = plan_exchange(self.rank, self.size)
        # Use gloo also on GPUs, because requests are bytes in host memory.
        self._control: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=self._timeout)
        node = self.rank // local_size if node is None else node
        local_facts = json.dumps([gpu, local_size, asdict(settings), node]).encode()
        facts = [json.loads(data) for data in self.exchange(local_facts)]  # by rank
        self.settings = EngineSettings(**facts[0][2])
        if self.settings != settings:
            logger.warning(
                "the engine settings of rank %d differ from those of rank 0, which are used; set the same HOROVOD_* "
                "variables on all ranks",
                self.rank,
            )
        # All ranks have the same facts, so they make the same choice.
        self._uses_nccl = len({gpu_name for gpu_name, *_ in facts if gpu_name}) == self.size
        self.is_homogeneous = all(num_local_ranks == local_size for _, num_local_ranks, *_ in facts)
        self.local_size = local_size if self.is_homogeneous else 1
        self._groups: dict[int, dist.ProcessGroup] = {}
        self.add_process_set(GLOBAL_SET, range(self.size))
        self._node_groups: NodeGroups | None = None
        is_wanted = self.settings.hierarchical_allreduce
        # If the setting is None, autotune tries hierarchical allreduces.
        if is_wanted or (is_wanted is None and self.settings.autotune):
            self._make_node_groups(group_by_node([facts_of_rank[3] for facts_of_rank in facts]))
        self.has_node_groups = self._node_groups is not None

    def combine(self, data: bytes) -> bytes:
        """Combine data in log2(ranks) steps, each of which sends them once."""
        assert self._control is not None
        # After n steps a rank has the AND of 2**n ranks, from itself on. In the last step some come again, which
        # does not change an AND.
        combined = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = torch.empty_like(combined)
        for tag, step in enumerate(self._steps):
            sending = self._control.send([combined], step.target, tag)
            self._control.recv([received], step.source, tag).wait()
            sending.wait()
            combined &= received
        return combined.numpy().tobytes()

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange data in log2(ranks) steps. If the data of a rank do not fit into a slot, add a collective."""
        slots = self._slots
        slots[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        beginning = data[: _SLOT_BYTES - _LENGTH_BYTES]
        slots[_LENGTH_BYTES : _LENGTH_BYTES + len(beginning)] = beginning
        assert self._control is not None
        # Use no allgather, because gloo runs it in another thread, and the switch takes longer than this exchange.
        for tag, step in enumerate(self._steps):
            sending = self._control.send([self._slot_range(0, step.num_parts)], step.target, tag)
            self._control.recv([self._slot_range(step.held, step.num_parts)], step.source, tag).wait()
            sending.wait()
        # The slots are in the order of the steps: this rank first.
        starts = [(rank - self.rank) % self.size * _SLOT_BYTES for rank in range(self.size)]
        lengths = [int.from_bytes(slots[start : start + _LENGTH_BYTES], "little") for start in starts]
        # All ranks have all lengths now, so either all of them or none run the second collective.
        if max(lengths) > _SLOT_BYTES - _LENGTH_BYTES:
            return self._exchange_long(data, lengths)
        return [
            bytes(slots[start + _LENGTH_BYTES : start + _LENGTH_BYTES + length])
            for start, length in zip(starts, lengths, strict=True)
        ]

    def wire_device(self, device: torch.device) -> torch.device:
        """Return the device itself if the ranks use NCCL, else the CPU."""
        return device if self._uses_nccl else torch.device("cpu")

    def add_process_set(self, process_set: int, ranks: Sequence[int]) -> None:
        """Create the group of a process set; ranks outside the set do not keep it."""
        group = self._new_group(ranks)
        if group is not None:
            self._groups[process_set] = group

    def remove_process_set(self, process_set: int) -> None:
        """Destroy the group of a process set if this rank is in the set."""
        group = self._groups.pop(process_set, None)
        if group is not None:
            dist.destroy_process_group(group)

    def begin_allreduce(self, tensor: Tensor, op: ReduceOp, process_set: int) -> CollectiveWork:
        """Begin to reduce a tensor in place over the ranks of the set."""
        work: CollectiveWork = dist.all_reduce(
            tensor, op=_REDUCE_OPS[op], group=self._groups[process_set], async_op=True
        )
        return work

    def begin_hierarchical_allreduce(self, tensor: Tensor, scratch: Tensor) -> CollectiveWork:
        """Begin to sum a tensor in place over all ranks, node by node. Needs `has_node_groups`."""
        assert self._node_groups is not None
        return HierarchicalWork(self._node_groups, tensor, scratch)

    def allgather(self, outputs: list[Tensor], tensor: Tensor, process_set: int) -> None:
        """Fill one output per rank of the set, in the order of the set."""
        dist.all_gather(outputs, tensor, group=self._groups[process_set])

    def broadcast(self, tensor: Tensor, root_rank: int, process_set: int) -> None:
        """Overwrite a tensor with the tensor of the root rank."""
        dist.broadcast(tensor, src=root_rank, group=self._groups[process_set])

    def alltoall(
        self, received: Tensor, sent: Tensor, received_lengths: list[int], sent_lengths: list[int], process_set: int
    ) -> None:
        """Send one part to each rank of the set, and receive one part from each, in the order of the set."""
        dist.all_to_all_single(received, sent, received_lengths, sent_lengths, group=self._groups[process_set])

    def reducescatter(self, output: Tensor, inputs: list[Tensor], process_set: int) -> None:
        """Sum input i of all ranks into the output of rank i of the set."""
        dist.reduce_scatter(output, inputs, group=self._groups[process_set])

    def swap(self, received: Tensor, sent: Tensor, partner: int, process_set: int) -> None:
        """Send a tensor to a partner, and receive the partner's tensor at the same time, so that neither waits."""
        group = self._groups[process_set]
        operations = [dist.P2POp(dist.isend, sent, partner, group), dist.P2POp(dist.irecv, received, partner, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def set_timeout(self, timeout_s: float) -> None:
        """Set the seconds after which a collective fails if a rank does not answer, also for the default group."""
        self._timeout = dt.timedelta(seconds=timeout_s)
        # None stands for the default group.
        for group in (None, self._control, *self._groups.values(), *(self._node_groups or ())):
            _set_pg_timeout(self._timeout, group)

    def close(self) -> None:
        """Destroy the groups, except for the default group, which the transport does not own."""
        # The connections close when the last reference to a group is deleted, so no reference may remain here.
        groups = [self._control, *self._groups.values(), *(self._node_groups or ())]
        self._control, self._groups, self._node_groups = None, {}, None
        while groups:
            group = groups.pop()
            # If the user has destroyed the default group, torch has destroyed every other group too.
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Create a group for tensors; return None on the ranks outside it. torch requires this call on all ranks."""
        backend = "cpu:gloo,cuda:nccl" if self._uses_nccl else "gloo"
        group = dist.new_group(list(ranks), backend=backend, timeout=self._timeout)
        return group if self.rank in ranks else None

    def _make_node_groups(self, nodes: list[list[int]]) -> None:
        reason = explain_flat(nodes)
        if not reason and len(nodes[0]) != self.local_size:
            reason = "the local sizes of the ranks are not the numbers of ranks on the nodes; check LOCAL_WORLD_SIZE"
        if reason:
            # No warning if only autotune would have tried them, without a request of the user.
            if self.rank == 0 and self.settings.hierarchical_allreduce:
                logger.warning("allreduces are not hierarchical, but flat: %s", reason)
            return
        # Every rank creates every group, in the same order.
        scatters = [self._new_group(ranks) for ranks in nodes]
        acrosses = [self._new_group(ranks) for ranks in zip(*nodes, strict=True)]
        gathers = [self._new_group(ranks) for ranks in nodes]
        # This rank is in one group of each kind.
        own = [group for groups in (scatters, acrosses, gathers) for group in groups if group is not None]
        self._node_groups = NodeGroups(*own)

    def _slot_range(self, first: int, num_slots: int) -> Tensor:
        return self._slot_tensor[first * _SLOT_BYTES : (first + num_slots) * _SLOT_BYTES]

    def _exchange_long(self, data: bytes, lengths: list[int]) -> list[bytes]:
        # An allgather needs equal lengths, so shorter data are padded with zeros.
        max_length = max(lengths)
        padded = torch.frombuffer(bytearray(data.ljust(max_length, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty(max_length, dtype=torch.uint8, device="cpu") for _ in lengths]
        dist.all_gather(gathered, padded, group=self._control)
        return [tensor[:length].numpy().tobytes() for tensor, length in zip(gathered, lengths, strict=True)]


# The ranks of a node reduce-scatter a tensor, so that each has the node's sum of one part. The ranks with the same
# local rank all-reduce their part over the nodes. Then the ranks of a node all-gather the parts. Of M nodes, each
# sends 2 (M - 1) / M times the bytes of the tensor; in a ring over all N ranks, 2 (N - 1) / N times.


class NodeGroups(NamedTuple):
    """The process groups of one rank, all made by torch.

    Attributes:
        scatter: ranks of this rank's node, in the order of ranks, for the reduce-scatters.
        across: one rank of each node, with the same local rank.
        gather: a second group of the ranks of `scatter`. Gathers and scatters begin in different threads, so in one
            group their order could differ between ranks.
    """

    scatter: dist.ProcessGroup
    across: dist.ProcessGroup
    gather: dist.ProcessGroup


def group_by_node(node_of_rank: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, nodes and ranks in increasing order, from the node number of each rank."""
    return [
        [rank for rank, node in enumerate(node_of_rank) if node == number] for number in sorted(set(node_of_rank))
    ]


def explain_flat(nodes: Sequence[Sequence[int]]) -> str:
    """Return why all-reduces over these nodes cannot be hierarchical, for a log line; empty if they can be."""
    sizes = sorted({len(ranks) for ranks in nodes})
    if len(nodes) == 1:
        return "all ranks are on one node"
    if len(sizes) > 1:
        return f"some nodes have {sizes[0]} ranks and others {sizes[-1]}; give each node the same number"
    return "each node has one rank only" if sizes == [1] else ""


class HierarchicalWork:
    """A hierarchical sum of a tensor, in place, that has begun; all ranks get equal bits.

    Every rank of the job constructs one in the same order, and waits for them in the same order. The tensor is flat
    and contiguous; its length is a multiple of the ranks per node. `scratch`, memory of the same size, is used only
    for tensors on the CPU, and belongs to this object until `wait` returns.
    """

    def __init__(self, groups: NodeGroups, tensor: Tensor, scratch: Tensor) -> None:
        self._groups, self._tensor, self._scratch = groups, tensor, scratch
        ranks_per_node = dist.get_world_size(groups.scatter)
        # The part that this rank reduces.
        self._part = tensor.chunk(ranks_per_node)[dist.get_rank(groups.scatter)]
        if tensor.is_cuda:
            # On a stream, a wait does not block this thread. Begin all collectives here, so that the threads of all
            # ranks begin those of NCCL in the same order.
            _reduce_scatter(self._part, tensor, group=groups.scatter)
            dist.all_reduce(self._part, group=groups.across)
            self._work = _all_gather(tensor, self._part, group=groups.gather, async_op=True)
        else:
            # `wait` adds the parts: gloo's reduce-scatter would send twice the bytes of an all-to-all.
            self._work = dist.all_to_all_single(
                as_bytes(scratch), as_bytes(tensor), group=groups.scatter, async_op=True
            )

    def wait(self) -> None:
        """Wait until the tensor has the sum; on CUDA, make the current stream wait for it.

        Raises:
            RuntimeError: a collective failed.
        """
        self._work.wait()
        if self._tensor.is_cuda:
            return
        # torch adds half precision in float32, and rounds the sum of the node once.
        torch.sum(self._scratch.view(-1, self._part.numel()), dim=0, out=self._part)
        dist.all_reduce(self._part, group=self._groups.across)
        _all_gather(self._tensor, self._part, group=self._groups.gather)
