"""Where the state of an elastic job comes from when ranks have met anew: a living rank, or the repository."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from datasvc.models import Checkpoint, CheckpointManager
from datasvc.trainer.recipes.first_rank import ask_first_rank


@dataclass(frozen=True)
class Newest:
    """Where the state came from.

    Attributes:
        source: "memory" of a rank that was there before, or "repository".
        step: of the state.
        seconds: that it took to bring it to this rank.
    """

    source: Literal["memory", "repository"]
    step: int
    seconds: float


def take_newest(state: Any, model: CheckpointManager, load: Callable[[Checkpoint], None]) -> Newest:
    """Go on from the newest state there is; every rank calls this first in the function that `elastic.run` repeats.

    Ranks that have met anew have the state of a rank that lived on, which `elastic.run` sends to all of them. Only
    where no rank did, as in a job that begins, or where the repository has a later step, is a checkpoint read.

    Args:
        state: an elastic state with a `step`, synchronized.
        model: where the job saves, opened since the ranks have met.
        load: puts a checkpoint into `state`, its step included.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: see `CheckpointManager.restore`.
    """
    began_s = time.perf_counter()
    stored = ask_first_rank(model.newest_step, name="newest_step")
    if stored is None or stored <= state.step:
        return Newest("memory", state.step, state.sync_s)
    load(model.restore())
    state.save()
    return Newest("repository", state.step, time.perf_counter() - began_s)
