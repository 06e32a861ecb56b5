"""Chooses the state that an elastic job continues after a restart: a surviving rank's state, or a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from datasvc.models import Checkpoint, CheckpointManager
from datasvc.trainer.recipes.first_rank import call_on_first_rank


@dataclass(frozen=True)
class Newest:
    """Describes the state that the job continues.

    Attributes:
        source: "memory" for the state of a surviving rank, "repository" for a checkpoint.
        step: step of the state.
        seconds: time in which this rank received the state.
    """

    source: Literal["memory", "repository"]
    step: int
    seconds: float


def take_newest(state: Any, model: CheckpointManager, load: Callable[[Checkpoint], None]) -> Newest:
    """Continue from the newest state. Every rank calls this at the start of the function that `elastic.run` repeats.

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
    # One rank decides for all: if a save completes now, some ranks would find its checkpoint and others would not.
    stored = call_on_first_rank(model.newest_step, name="newest_step")
    if stored is None or stored <= state.step:
        return Newest("memory", state.step, state.sync_s)
    load(model.restore())
    # After a failure `elastic.run` restores the last saved state, which must not be older than the checkpoint.
    state.save()
    return Newest("repository", state.step, time.perf_counter() - began_s)
