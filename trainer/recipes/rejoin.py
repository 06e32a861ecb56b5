"""Chooses the state that an elastic job continues after a restart: that of a surviving rank, or a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from datasvc.models import Checkpoint, CheckpointManager
from datasvc.trainer.recipes.first_rank import call_on_first_rank


@dataclass(frozen=True)
class Newest:
    """The state that the job continues.

    Attributes:
        source: "memory" of a surviving rank, or "repository".
        step: step of the state.
        seconds: time until this rank had the state.
    """

    source: Literal["memory", "repository"]
    step: int
    seconds: float


def take_newest(state: Any, model: CheckpointManager, load: Callable[[Checkpoint], None]) -> Newest:
    """Continue from the newest state. Every rank calls this first in the function that `elastic.run` repeats.

    `elastic.run` sends the state of a surviving rank to all ranks. A checkpoint is read only if no rank survived, as
    at the start of a job, or if the repository has a later step.

    Args:
        state: elastic state with a `step`, already synchronized by `elastic.run`.
        model: manager of the job's checkpoints, opened after the last rendezvous.
        load: loads a checkpoint into `state`, including its step.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: see `CheckpointManager.restore`.
    """
    began_s = time.perf_counter()
    # One rank decides for all, because a save that completes now could be found by some ranks only.
    stored = call_on_first_rank(model.newest_step, name="newest_step")
    if stored is None or stored <= state.step:
        return Newest("memory", state.step, state.sync_s)
    load(model.restore())
    # After a failure `elastic.run` restores the last saved state, which must not be older than the checkpoint.
    state.save()
    return Newest("repository", state.step, time.perf_counter() - began_s)
