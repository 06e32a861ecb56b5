"""What every server does for its workers, and the servers that only do this. Server 0 is the `Coordinator`.

A worker sends `pull` and gets the weights; it sends `push`, the number of its lease and the gradients, and gets an
answer when they are staged. Server 0 sends `apply`, `lose` and `state` to the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.distributed_c10d import Store

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.signs_of_life import SignsOfLife, silent_server
from datasvc.trainer.servers.parameter_shard import MakeOptimizer, ParameterShard
from datasvc.trainer.servers.server_link import ServerLink

_JOIN_S: Final = 5.0


def answer_worker(link: ServerLink, shard: ParameterShard, worker: int, message: Mapping[str, Any]) -> None:
    """Answer a message of a worker about the weights of this server."""
    if message["op"] == "pull":
        link.send(shard.pull())
    else:
        assert message["op"] == "push"
        shard.stage((worker, message["lease"]), link.receive(torch.empty(shard.size, device="cpu")))
        link.send_message()


def change_shard(shard: ParameterShard, message: Mapping[str, Any]) -> None:
    """Do what server 0 has decided for all servers: `apply` an update, or `lose` a worker with what it pushed."""
    if message["op"] == "apply":
        pushes = [(worker, lease) for worker, lease in message["pushes"]]
        shard.apply(pushes, num_targets=message["num_targets"], rate=message["rate"])
    else:
        assert message["op"] == "lose"
        if message["lease"] is not None:
            shard.discard((message["worker"], message["lease"]))


def serve_shard(
    store: Store,
    *,
    server: int,
    num_workers: int,
    make_optimizer: MakeOptimizer,
    timeout_s: float,
    lost_after_s: float,
) -> None:
    """Serve a part of the weights until server 0 ends the job.

    Args:
        store: store of the job.
        server: number of this server, from 1.
        num_workers: number of workers.
        make_optimizer: makes the optimizer of this server's weights.
        timeout_s: how long to wait for server 0 to connect.
        lost_after_s: seconds without a sign of life after which server 0 is lost.

    Raises:
        HorovodInternalError: server 0 is lost, or did not connect in time.
    """
    control = ServerLink(store, f"control/{server}", end=0, peer="server 0 (rank 0)", timeout_s=timeout_s)
    shard = ParameterShard(control.receive_state(), make_optimizer)
    links: dict[int, ServerLink] = {}

    def serve(worker: int) -> None:
        # If the worker is lost, this thread ends, and those of the others go on.
        with contextlib.suppress(HorovodInternalError):
            link = links[worker] = ServerLink(store, f"{server}/{worker}", end=0, peer=f"worker {worker}")
            while True:
                answer_worker(link, shard, worker, link.receive_message())

    threads = [
        threading.Thread(target=serve, args=(worker,), daemon=True, name=f"worker-{worker}")
        for worker in range(num_workers)
    ]
    for thread in threads:
        thread.start()

    def leave(_: int) -> None:
        control.abort(silent_server(lost_after_s))

    with SignsOfLife(store, server, [0], leave, lost_after_s=lost_after_s):
        while (message := control.receive_message())["op"] != "end":
            if message["op"] == "state":
                control.send_state(shard.state())
                continue
            change_shard(shard, message)
            if message["op"] == "lose" and (link := links.pop(message["worker"], None)):
                link.abort("this worker was dropped")
            control.send_message()
    end_links(links.values(), threads)


def end_links(links: Iterable[ServerLink], threads: Sequence[threading.Thread]) -> None:
    """Close the links to workers, and wait for their threads, for a few seconds at most.

    A thread that continues while the interpreter ends can abort the process.
    """
    for link in list(links):
        link.abort("the job is over")
    deadline_s = time.monotonic() + _JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
