"""A worker's side of the servers: takes leases, pulls weights and pushes gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from datasvc.trainer.rendezvous.signs_of_life import SignsOfLife, silent_server
from datasvc.trainer.servers.server_link import ServerLink


@dataclass(frozen=True)
class Grant:
    """A part of a step that this worker computes.

    Attributes:
        lease: number of the lease.
        epoch, position: where the step begins in the access order.
        part: number of the part.
        lost: workers that had the lease before, and were lost.
    """

    lease: int
    epoch: int
    position: int
    part: int
    lost: Sequence[int]


class WorkerClient:
    """Connection of a worker to all servers.

    Args:
        store: store of the job.
        worker: number of this worker.
        num_servers: number of servers.
        timeout_s: how long to wait for the servers.
        lost_after_s: seconds without a sign of life after which server 0 is lost.

    Attributes:
        welcome: what server 0 has sent, see `Coordinator`.
        end: the last message of server 0, once `next_grant` has returned None.

    Raises:
        HorovodInternalError: a server did not connect in time. All methods raise it, with the number of the server,
            if one is lost, and with the rank of this worker if the job goes on without it.
    """

    def __init__(
        self,
        store: Store,
        *,
        worker: int,
        num_servers: int,
        timeout_s: float,
        lost_after_s: float,
    ) -> None:
        self._rank, self._lost_after_s = num_servers + worker, lost_after_s
        self._links: list[ServerLink] = []
        self._life = SignsOfLife(store, self._rank, [0], self._leave, lost_after_s=lost_after_s)
        try:
            for server in range(num_servers):
                link = ServerLink(
                    store, f"{server}/{worker}", end=1, peer=f"server {server} (rank {server})", timeout_s=timeout_s,
                    explain=self._explain,
                )  # fmt: skip
                self._links.append(link)
            self.welcome: Mapping[str, Any] = self._links[0].receive_state()
        except BaseException:
            self._life.__exit__()
            raise
        self.end: Mapping[str, Any] = {}
        self._done: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._life.__exit__()
        for link in self._links:
            link.abort("this end of the link is closed")

    def next_grant(self) -> Grant | None:
        """Commit the part that was pushed last, and return the next one when it may begin; None: the job ends."""
        self._links[0].send_message(op="next", done=self._done)
        self._done = None
        message = self._links[0].receive_message()
        if "end" in message:
            self.end = message["end"]
            return None
        return Grant(**message)

    @torch.no_grad()
    def pull(self, weights: Sequence[Sequence[Tensor]]) -> None:
        """Fill the weights of each server, in the order of its names, with those of now."""
        for link in self._links:
            link.send_message(op="pull")
        for link, parts in zip(self._links, weights, strict=True):
            sizes = [part.numel() for part in parts]
            pulled = link.receive(torch.empty(sum(sizes), device="cpu"))
            for part, values in zip(parts, torch.split(pulled, sizes), strict=True):
                part.copy_(values.view(part.shape))

    def push(self, grant: Grant, gradients: Sequence[Sequence[Tensor]], *, loss: float, num_targets: int) -> None:
        """Send the gradients of a part of a step: sums over its targets, as `pull` has the weights.

        They are applied after the next `next_grant`. `loss` is the sum of the losses of the targets.
        """
        for link, parts in zip(self._links, gradients, strict=True):
            link.send_message(op="push", lease=grant.lease)
            # Sparse gradients, of embeddings, are sent in full.
            dense = (part.detach().to_dense().flatten().cpu().float() for part in parts)
            link.send(torch.cat([torch.empty(0, device="cpu"), *dense]))
        for link in self._links:
            link.receive_message()
        self._done = {"lease": grant.lease, "loss": loss, "num_targets": num_targets}

    def _leave(self, rank: int) -> None:
        reason = silent_server(self._lost_after_s) if rank == 0 else self._explain()
        for link in self._links:
            link.abort(reason)

    def _explain(self) -> str:
        """Return why the servers have closed the connections, if they have dropped this worker."""
        if not self._life.was_dropped:
            return ""
        return (
            f"this worker, rank {self._rank}, was dropped: it gave no sign of life for {self._lost_after_s:g} s, and "
            "the job goes on without it; what it has computed since then is not used"
        )
