"""The rest of an averaging round in which a replica was lost (`--elastic`): what a copy has of it, and its end.

The other replicas keep the weights that they have, divide the positions that none of these have learned from, see
`datasvc.ledger.broken_rounds`, and average after a few more steps. A replica that is new takes part with the weights
of another one. Invariant: all ranks are at the same step before and after it, as in a round with leases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import datasvc.trainer as hvd
from datasvc.ledger.broken_rounds import CatchUpPlan, RoundPart, plan_catch_up
from datasvc.loaders.core.mixture import Mixture
from datasvc.planning.layout import Layout, plan_layout
from datasvc.trainer.job import runtime
from datasvc.trainer.optim.broadcast_state import allgather_object
from datasvc.trainer.recipes.optimizers.leased_rounds import LeasedRounds


@dataclass(frozen=True)
class RoundCopy:
    """Where a copy that a rank makes in a round begins.

    Attributes:
        part: what its replica has applied of the round.
        step: steps of the run at the start of the round.
        num_steps: steps that the optimizer has counted there.
    """

    part: RoundPart
    step: int
    num_steps: int

    def rewind(self, optimizer: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with the counters of the start of the round, and nothing that was sent."""
        averaging = {**optimizer["averaging"], "num_steps": self.num_steps}
        if averaging["outer"] is not None:
            averaging["outer"] = {**averaging["outer"], "changes": {}}
        return {**optimizer, "averaging": averaging}


def find_round(run: Any) -> RoundCopy | None:
    """Return the round that a rank of a `Run` is in, after its last step; None: the round cannot be continued.

    A round that the end of an epoch or of the run cuts cannot, because all ranks evaluate or save in it. Nor can one
    with leases; nor one that had begun before this run was built: what the lost replica had learned in its first
    steps is in no position.
    """
    if isinstance(run.rounds, LeasedRounds):
        return None
    if isinstance(run.rounds, CatchUp):
        return run.rounds.copy()
    # If averaging has failed, the optimizer has counted its last step, and the run has not.
    uncounted = int(run.is_updating)
    steps = run.optimizer.sync_policy.round_at(run.optimizer.num_steps - uncounted)
    num_done = run.optimizer.num_steps - steps.start
    epoch, position = run.loader.cursor
    ranks, global_batch = run.layout.num_data_ranks, run.batches.global_batch
    start, start_step = position - num_done * global_batch, run.step + uncounted - num_done
    part = RoundPart(epoch, start, len(steps), global_batch, ranks, np.empty(0, np.int64))
    is_cut = run.config.max_steps is not None and start_step + len(steps) > run.config.max_steps
    is_within = start >= 0 and part.stop <= run.loader.split.num_positions and not is_cut
    if not is_within or steps.start < run.first_round_step:
        return None
    per_replica = run.layout.averaged_data_ranks
    replica = _data_ranks(run.layout)[hvd.rank()] // per_replica
    lanes = 1 if isinstance(run.loader.split, Mixture) else run.loader.order.lanes
    own = range(replica * per_replica, (replica + 1) * per_replica)
    return RoundCopy(part.with_steps(num_done, own, lanes=lanes), start_step, steps.start)


def begin_catch_up(run: Any, part: RoundPart) -> CatchUp | None:
    """Return the rest of a round as this rank has it, before its first batch; None: no replica has applied any.

    Every rank calls this, at the start of the round, with what its replica has applied.
    """
    per_replica = run.layout.averaged_data_ranks
    data_ranks = _data_ranks(run.layout)
    gathered = allgather_object(part, name="catch_up.parts")
    parts = [gathered[data_ranks.index(rank)] for rank in range(0, run.layout.num_data_ranks, per_replica)]
    if not any(len(each.applied) for each in parts):
        return None
    plan = plan_catch_up(parts, batch_size=run.batches.batch_size, ranks_per_replica=per_replica)
    return CatchUp(run, part, plan)


class CatchUp:
    """The rest of a round on one rank, in place of `Run.rounds` until it ends. See `begin_catch_up`.

    Attributes:
        start_step: steps of the run at the start of the round.
        step: those at its end.
        num_applied: samples of the round that were applied before.
        samples_per_step: samples of all ranks for each step of this rank.
    """

    is_last = True  # afterwards, ranks make the same steps again

    def __init__(self, run: Any, part: RoundPart, plan: CatchUpPlan) -> None:
        self._run, self._part, self._plan = run, part, plan
        self._per_replica = run.layout.averaged_data_ranks
        rank = _data_ranks(run.layout)[hvd.rank()]
        self._replica, self._rest = rank // self._per_replica, plan.rests[rank]
        self._first = run.optimizer.num_steps
        self.start_step, self.step = run.step, run.step + part.num_steps
        self.num_applied = self._rest.num_applied
        self.samples_per_step = (part.stop - part.start - self.num_applied) / len(self._rest.batches)
        self._num_done = self._num_trained = 0
        self._loss = torch.zeros((), device=run.device)  # sum over the steps
        run.optimizer.lease_rounds(is_averaged=False)
        run.loader.read_rest(self._rest)

    def got_batch(self) -> None:
        """Do nothing: no speed is measured."""

    def end_step(self, loss: torch.Tensor, num_samples: int) -> torch.Tensor | None:
        """Count a step of this rank, and after its last one end the round: the ranks average their weights.

        The mean is weighted by samples. For arguments and result, see `LeasedRounds`.

        Raises:
            HorovodInternalError: another rank is lost.
        """
        self._num_done += 1
        self._num_trained += num_samples > 0
        self._loss = self._loss + loss.detach()
        runtime.current_job().engine.check()
        if self._num_done < len(self._rest.batches):
            return None
        row = torch.tensor([[float(self._loss), self._num_trained]], dtype=torch.float64, device="cpu")
        total, num_trained = hvd.allgather(row, name="catch_up.losses").sum(0).tolist()
        samples = self._plan.samples
        weight = samples[self._replica] * len(samples) / sum(samples)
        optimizer, part = self._run.optimizer, self._part
        optimizer.end_round(weight=weight, num_steps=part.num_steps)
        optimizer.end_leases()
        self._run.reading.end_broken_round(step=self.step, global_batch=part.global_batch, ranks=part.ranks)
        return torch.tensor(total / max(num_trained, 1), device="cpu")

    def copy(self) -> RoundCopy:
        """Return what the replica of this rank has applied up to its last step."""
        first = self._replica * self._per_replica
        rests = self._plan.rests[first : first + self._per_replica]
        trained = [batch for rest in rests for batch in rest.batches[: self._num_done]]
        applied = np.sort(np.concatenate([self._part.applied, *trained]))
        part = replace(self._part, applied=applied)
        return RoundCopy(part, self.start_step, self._first)


def _data_ranks(layout: Layout) -> list[int]:
    return [each.data_rank for each in plan_layout(layout).ranks]
