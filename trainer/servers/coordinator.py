"""Server 0: grants leases to workers, and decides which pushes are applied, on all servers in the same order.

A thread per worker answers its messages. Decisions are made under one lock, so updates have one order. A lease is
committed when its worker has reported that all servers have staged its gradients: whatever happens to the worker from
then on, the update is applied on every server. A worker that is lost before has changed nothing, and its lease is
granted to another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from torch.distributed.distributed_c10d import Store

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.signs_of_life import SignsOfLife
from datasvc.trainer.servers.leases import LeaseTable, Staleness
from datasvc.trainer.servers.parameter_shard import MakeOptimizer, ParameterShard
from datasvc.trainer.servers.server_link import ServerLink
from datasvc.trainer.servers.shard_server import answer_worker, change_shard, end_links

_LATE_WORKERS_S: Final = 60.0


@dataclass
class _StepSums:
    """Sums over the parts of a step: of the losses, and of the numbers of targets."""

    loss: float = 0.0
    num_targets: int = 0


@dataclass(frozen=True)
class Gate:
    """A number of consecutive steps of one epoch, for which leases are granted.

    Attributes:
        epoch, position: where the first step begins in the access order.
        num_steps: number of steps.
        step_samples: samples of a step.
        rate_at: returns the learning rate of the step that begins at a position.
    """

    epoch: int
    position: int
    num_steps: int
    step_samples: int
    rate_at: Callable[[int], float] = field(repr=False)


class Coordinator:
    """Serves the first part of the weights, and coordinates all servers and workers.

    Args:
        store: store of the job.
        shards: state of the shard of each server, see `ParameterShard`; more than one: the other servers get theirs.
        make_optimizer: makes the optimizer of a shard.
        num_workers: number of workers, which is the number of parts of a step.
        staleness: when a worker waits for slower ones.
        welcome: what a worker gets when it connects: tensors, numbers and texts in dicts and lists.
        lost_after_s: seconds without a sign of life after which a worker is dropped, or another server is lost.
        on_lost: called with the number of a worker that is lost, from a thread.
        timeout_s: how long to wait for the other servers to connect.

    Raises:
        HorovodInternalError: another server did not connect in time.
    """

    def __init__(
        self,
        store: Store,
        shards: Sequence[Mapping[str, Any]],
        make_optimizer: MakeOptimizer,
        *,
        num_workers: int,
        staleness: Staleness,
        welcome: Mapping[str, Any],
        lost_after_s: float,
        on_lost: Callable[[int], None] = lambda _: None,
        timeout_s: float = 600.0,
    ) -> None:
        self._store, self._welcome, self._on_lost = store, welcome, on_lost
        self._num_workers, self._staleness = num_workers, staleness
        self.shard = ParameterShard(shards[0], make_optimizer)
        self.leases = LeaseTable(num_workers, staleness.bound)
        self._changed = threading.Condition()
        self._gate: Gate | None = None
        self._first_step = 0  # of the gate
        self._sums: dict[int, _StepSums] = defaultdict(_StepSums)
        self._targets: dict[int, int] = {}  # of leases that are staged and not applied
        self._living = set(range(num_workers))
        self._failure: Exception | None = None  # that `run_steps` raises
        self._end: Mapping[str, Any] | None = None  # the last message to each worker
        self._others: list[ServerLink] = []
        self._links: dict[int, ServerLink] = {}  # of workers
        self._lost_after_s = lost_after_s
        for server, state in enumerate(shards[1:], start=1):
            peer = f"server {server} (rank {server})"
            self._others.append(ServerLink(store, f"control/{server}", end=1, peer=peer, timeout_s=timeout_s))
            self._others[-1].send_state(dict(state))
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True, name=f"worker-{worker}")
            for worker in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()
        others = range(1, len(shards) + num_workers)
        self._life = SignsOfLife(store, 0, others, self._end_silent, lost_after_s=lost_after_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._life.__exit__()

    def run_steps(self, gate: Gate) -> Iterator[float]:
        """Grant the leases of some steps; yield the mean loss of each step, in order, when all its parts are applied.

        After the last one, no lease is granted: the weights are those after all steps before. `close_gate` ends the
        steps earlier.

        Raises:
            HorovodInternalError: all workers are lost, or another server is. Errors of the optimizer are raised too.
        """
        with self._changed:
            self._first_step, self._gate = self.leases.num_done, gate
            self.leases.open(gate.num_steps)
            self._changed.notify_all()
        step = self._first_step
        while True:
            with self._changed:
                while self.leases.num_done <= step and not self.leases.is_drained and self._failure is None:
                    self._changed.wait()
                if self._failure is not None:
                    raise self._failure
                if self.leases.num_done <= step:
                    self._gate = None
                    return
                sums = self._sums.pop(step)
            step += 1
            yield sums.loss / max(sums.num_targets, 1)

    def close_gate(self) -> None:
        """Grant no more leases, but those that complete the steps that have begun."""
        with self._changed:
            self.leases.close()
            self._changed.notify_all()

    def state(self) -> list[dict[str, Any]]:
        """Return the state of the shards of all servers, see `ParameterShard.state`, while no lease is granted."""
        with self._changed:
            assert self.leases.is_drained
            for link in self._others:
                link.send_message(op="state")
            return [self.shard.state(), *(link.receive_state() for link in self._others)]

    def end(self, **message: Any) -> None:
        """Send a last message to all workers, and end the other servers once the workers have it."""
        with self._changed:
            self._end = message
            self._changed.notify_all()
            # A worker that has not connected yet may never do so.
            self._changed.wait_for(lambda: not self._living, timeout=_LATE_WORKERS_S)
            for link in self._others:
                link.send_message(op="end")
        end_links(self._links.values(), self._threads)

    def _serve(self, worker: int) -> None:
        """Answer a worker until it is lost or the job ends."""
        try:
            link = ServerLink(self._store, f"0/{worker}", end=0, peer=f"worker {worker}")
            with self._changed:
                self._require_living(worker)
                self._links[worker] = link
            link.send_state(dict(self._welcome))
            while True:
                message = link.receive_message()
                if message["op"] != "next":
                    answer_worker(link, self.shard, worker, message)
                    continue
                if (done := message["done"]) is not None:
                    self._commit(worker, **done)
                if (answer := self._wait_for_lease(worker)) is None:
                    break
                link.send_message(**answer)
            assert self._end is not None
            link.send_message(end=self._end)
            with self._changed:
                self._living.discard(worker)
                self._changed.notify_all()
        except HorovodInternalError as error:
            self._lose(worker, error)
        except Exception as error:  # noqa: BLE001 - of this server, such as of its optimizer: `run_steps` raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait_for_lease(self, worker: int) -> dict[str, Any] | None:
        """Return the next lease of a worker, when it may begin; None: the job ends."""
        with self._changed:
            lease = None
            self._require_living(worker)
            while self._end is None and (lease := self.leases.grant(worker)) is None:
                self._changed.wait()
                self._require_living(worker)
            if lease is None:
                return None
            assert self._gate is not None
            position = self._position_of(lease.step)
            return {"lease": lease.number, "epoch": self._gate.epoch, "position": position} | {
                "part": lease.part,
                "lost": lease.lost,
            }

    def _commit(self, worker: int, lease: int, loss: float, num_targets: int) -> None:
        """Apply the update that a lease completes, on all servers, and commit the lease."""
        with self._changed:
            self._require_living(worker)
            assert self._gate is not None
            step = lease // self._num_workers
            sums = self._sums[step]
            sums.loss, sums.num_targets = sums.loss + loss, sums.num_targets + num_targets
            self._targets[lease] = num_targets
            if pushes := self.leases.plan_update(worker, lease):
                rate = self._gate.rate_at(self._position_of(step))
                if not self._staleness.is_synchronous:
                    # An update of one part of a step goes as far as this part of the whole step would.
                    rate /= self._num_workers
                total = sum(self._targets.pop(number) for _, number in pushes)
                self._decide(op="apply", pushes=pushes, num_targets=total, rate=rate)
            self.leases.commit(worker, lease)
            self._changed.notify_all()

    def _decide(self, **message: Any) -> None:
        """Change the shards of all servers. Every server has done it when this returns."""
        try:
            for link in self._others:
                link.send_message(**message)
            change_shard(self.shard, message)
            for link in self._others:
                link.receive_message()
        except HorovodInternalError as error:
            self._failure = error
            self._changed.notify_all()
            raise

    def _lose(self, worker: int, error: HorovodInternalError) -> None:
        with self._changed:
            if worker not in self._living:
                return
            self._living.discard(worker)
            if link := self._links.pop(worker, None):
                link.abort(str(error))
            is_over = self._end is not None or self._failure is not None
            if not is_over:
                number = self.leases.lose(worker)
                if not self._living:
                    self._failure = HorovodInternalError(f"all workers are lost; the last one: {error}")
                else:
                    with contextlib.suppress(HorovodInternalError):  # `_decide` has kept it for `run_steps`
                        self._decide(op="lose", worker=worker, lease=number)
            self._changed.notify_all()
        if not is_over:
            self._on_lost(worker)

    def _end_silent(self, rank: int) -> None:
        """Drop a worker that gives no sign of life, or end the run if it is a server."""
        worker, silence = rank - 1 - len(self._others), f"without a sign of life for {self._lost_after_s:g} s"
        if worker >= 0:
            self._life.drop(rank)  # before its links break, so that it finds why
            self._lose(worker, HorovodInternalError(f"worker {worker} is lost, {silence}"))
            return
        error = HorovodInternalError(f"server {rank} (rank {rank}) is lost, {silence}")
        self._others[rank - 1].abort(str(error))  # without the lock: a thread that waits for this server has it
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _require_living(self, worker: int) -> None:
        """Raise HorovodInternalError if a worker was dropped while its thread waited for the lock or for a lease."""
        if worker not in self._living:
            raise HorovodInternalError(f"worker {worker} was dropped")

    def _position_of(self, step: int) -> int:
        assert self._gate is not None
        return self._gate.position + (step - self._first_step) * self._gate.step_samples
