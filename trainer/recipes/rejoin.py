"""Chooses the state from which an elastic job continues after a restart: of a surviving rank, or of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from datasvc.models import Checkpoint, CheckpointManager, LocalVersion
from datasvc.trainer.recipes.first_rank import call_on_first_rank


@dataclass(frozen=True)
class Newest:
    """Describes the state from which the job continues.

    Attributes:
        source: "memory" for the state of a surviving rank, "nodes" for a checkpoint on the disks of the nodes,
            "repository" for another one.
        step: step of the state.
        seconds: how long this rank took to receive the state.
    """

    source: Literal["memory", "nodes", "repository"]
    step: int
    seconds: float


def take_newest(state: Any, model: CheckpointManager, load: Callable[[Checkpoint], None]) -> Newest:
    """Continue from the newest state. Every rank must call this first in the function that `elastic.run` repeats.

    `elastic.run` has already sent the state of a surviving rank, if there is one, to all ranks. A checkpoint is
    loaded only if its step is later than `state.step`.

    Args:
        state: elastic state with a `step`, already synchronized by `elastic.run`.
        model: manager of the job's checkpoints, opened after the last rendezvous.
        load: loads a checkpoint into `state`, and sets `state.step`.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: see `CheckpointManager.restore`.
    """
    began_s = time.perf_counter()
    if model.has_nodes and not state.step:
        # No rank has a state: continue the newest version, which may be on the disks of the nodes only.
        newest = model.restore(default=None)
        if newest is not None:
            load(newest)
            state.save()
            source: Literal["nodes", "repository"] = (
                "nodes" if isinstance(newest.version, LocalVersion) else "repository"
            )
            return Newest(source, state.step, time.perf_counter() - began_s)
        return Newest("memory", state.step, state.sync_s)
    # Only rank 0 looks the newest step up: if a save completes now, some ranks would find it and others would not.
    stored = call_on_first_rank(model.newest_step, name="newest_step")
    if stored is None or stored <= state.step:
        return Newest("memory", state.step, state.sync_s)
    load(model.restore())
    # After a failure, `elastic.run` restores the last saved state. It must not be older than this checkpoint.
    state.save()
    return Newest("repository", state.step, time.perf_counter() - began_s)
