"""Rounds in which each replica makes as many steps as it can (`--leases`): who gets how much, and the end of a round.

The ranks exchange what they have measured at the end of each round, and compute the same shares from it, so no
process decides for the others. The shares are those of the round after the next one: two rounds are planned in the
loader, and its prefetch does not stop between them. `datasvc.ledger.leases` divides the positions.

Invariant: all ranks are at the same step after a round, and only there do they save, report or stop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import datasvc.trainer as hvd
from datasvc.ledger.leases import Leases, choose_shares
from datasvc.loaders import Loader
from datasvc.models import ConsumptionTracker
from datasvc.models.provenance.forgetting import RepeatedSteps
from datasvc.planning.layout import Layout, plan_layout
from datasvc.trainer.optim.sync_policy import SyncPolicy


class LeasedRounds:
    """The rounds of a run on one rank. Every rank makes one at the same position of the run, before the first batch.

    Args:
        optimizer: one of `hvd.Averaging`, with the state that the run continues.
        loader: loader of the training split, at the position of the run.
        reading: tracker of what the run consumes.
        layout: layout of the ranks.
        policy: when the replicas average.
        is_measured: whether shares follow the speeds of the replicas; otherwise they are equal.
        step: optimizer steps so far.
        max_steps: steps at which the run ends; None: it has no such limit. A round that would be longer is shortened.
        device: device of the losses.
        saved: `state_dict` of the version that the run continues; {}: it begins with equal shares. At another number
            of replicas it begins with these too.
        recorded: steps that the run takes again, with their leases, in place of measured ones.

    Attributes:
        step: steps of the run at the end of the last round.
        start_step: those before it.
        samples_per_step: samples of the last round, of all ranks, for each step of this rank.
    """

    is_last = False

    def __init__(
        self,
        optimizer: Any,
        loader: Loader[Any],
        reading: ConsumptionTracker,
        *,
        layout: Layout,
        policy: SyncPolicy,
        is_measured: bool,
        step: int,
        max_steps: int | None,
        device: torch.device,
        saved: Mapping[str, Any],
        recorded: Sequence[RepeatedSteps] = (),
    ) -> None:
        self._optimizer, self._reading = optimizer, reading
        self._policy, self._is_measured, self._max_steps = policy, is_measured, max_steps
        per_replica = layout.averaged_data_ranks
        self._num_replicas = layout.num_data_ranks // per_replica
        self._recorded = recorded
        data_ranks = [each.data_rank for each in plan_layout(layout).ranks]
        self._replicas = [rank // per_replica for rank in data_ranks]  # of each rank
        # Ranks that read the same batches count once.
        self._counts = [data_ranks.index(data_rank) == rank for rank, data_rank in enumerate(data_ranks)]
        optimizer.lease_rounds(is_averaged=bool(saved) or None)
        self._rounds = loader.read_in_rounds(policy.steps)
        equal = (policy.steps,) * self._num_replicas
        planned = [tuple(shares) for shares in saved.get("planned", ())]
        is_same = is_measured and [(len(each), sum(each)) for each in planned] == ([(len(equal), sum(equal))] * 2)
        self._planned = deque(planned if is_same else [equal, equal])  # shares of whole rounds, from this one on
        # Of the rounds that the loader knows: leases, steps of all ranks, and global batches.
        self._known: deque[tuple[Leases, int, int]] = deque()
        self.start_step = self.step = step
        self._end = step, optimizer.num_steps  # steps, and global batches of a replica, after all of them
        for shares in self._planned:
            self._add(shares)
        self._loss = torch.zeros((), device=device)  # sum over the steps of the round
        self._began_s = 0.0
        self._num_samples = self._num_steps = 0
        self.samples_per_step = 0.0
        reading.switch_leases(self._known[0][0], step=step)

    def end_step(self, loss: torch.Tensor, num_samples: int) -> torch.Tensor | None:
        """Count a step of this rank, and if it was the last one of its round, average the weights.

        Args:
            loss: mean loss of the step.
            num_samples: samples of this rank in the step.

        Returns:
            The mean of the losses of all steps of the round, equal on all ranks; None: the round goes on.
        """
        self._num_samples += num_samples
        self._num_steps += 1
        self._loss = self._loss + loss.detach()
        if self._rounds.ended is None:
            return None
        total_loss = float(self._loss)  # waits for the device
        measured = [self._measure_s(), self._num_samples, total_loss, self._num_steps]
        row = torch.tensor([measured], dtype=torch.float64, device="cpu")
        rows = hvd.allgather(row, name="leases.measured").tolist()
        samples = [0.0] * self._num_replicas
        seconds = [0.0] * self._num_replicas
        for (rank_s, num, _, _), replica, counts in zip(rows, self._replicas, self._counts, strict=True):
            samples[replica] += num * counts
            seconds[replica] = max(seconds[replica], rank_s)  # the ranks of a replica wait for its slowest
        _, num_steps, num_batches = self._known.popleft()
        weight = samples[self._replicas[hvd.rank()]] * self._num_replicas / sum(samples)
        self._optimizer.end_round(weight=weight, num_steps=num_batches)
        self.samples_per_step = sum(samples) / self._num_steps
        speeds = [num / max(time_s, 1e-9) for num, time_s in zip(samples, seconds, strict=True)]
        self._planned.popleft()
        self._planned.append(self._choose(speeds))
        self._add(self._planned[-1])
        self.start_step, self.step = self.step, self.step + num_steps
        self._loss = torch.zeros_like(self._loss)
        self._num_samples = self._num_steps = 0
        self._reading.switch_leases(self._known[0][0], step=self.step)
        return torch.tensor(sum(each[2] for each in rows) / sum(each[3] for each in rows), device="cpu")

    def got_batch(self) -> None:
        """Mark that the first batch of a round has arrived, from when on the speed of this rank is measured."""
        if not self._num_steps:
            self._began_s = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return the shares of the two rounds that follow, as JSON values. Call this between rounds."""
        return {"planned": [list(shares) for shares in self._planned]}

    def _measure_s(self) -> float:
        """Return the seconds from the first batch of this rank to the end of its last step, without the round."""
        return time.perf_counter() - self._began_s

    def _choose(self, speeds: Sequence[float]) -> tuple[int, ...]:
        # In a last batch of an epoch that is not full, a rank may have had no samples, and so no speed.
        if not self._is_measured or min(speeds) <= 0:
            return self._planned[-1]
        return choose_shares(self._policy.steps * self._num_replicas, speeds, self._planned[-1])

    def _add(self, shares: tuple[int, ...]) -> None:
        """Plan the next round that the loader does not have, with these shares if it is a whole one."""
        step, batches = self._end
        leases = self._leases_of(shares, step, batches)
        added = self._rounds.add(leases)
        num_batches = -(-(added.stop - added.start) // (added.batch_size * added.ranks))
        self._known.append((leases, added.num_steps, num_batches))
        self._end = step + added.num_steps, batches + num_batches

    def _leases_of(self, shares: tuple[int, ...], step: int, batches: int) -> Leases:
        for part in self._recorded:
            if part.stop_step > step and part.leases is not None and len(part.leases.shares) == len(shares):
                return part.leases
        if batches < self._policy.warmup_steps:
            return Leases(1, (1,) * len(shares))
        steps = self._policy.steps
        if self._max_steps is not None:
            steps = min(steps, max(self._max_steps - step, 1))
        return Leases(self._policy.steps, shares).of(steps)
