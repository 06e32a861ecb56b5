"""Chooses the state from which an elastic job continues after a restart: of a surviving rank, or of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import datasvc.trainer as hvd
from datasvc.models import Checkpoint, CheckpointManager, LocalVersion
from datasvc.models.saving.rank_channel import describe_error, raise_on_all_ranks

T = TypeVar("T")


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


# All ranks get the same result even if the repository that the function reads changes meanwhile. For example, all
# ranks load the same newest version of a model.


def call_on_first_rank(function: Callable[[], T], *, name: str) -> T:
    """Call `function` on rank 0 and return its result on every rank, or raise its error on every rank.

    A collective: every rank must call this, in the same order among its collectives. A broadcast called `name` sends
    the result as a pickle. A failure of `function` is sent too, so no rank waits forever.

    Raises:
        DatasvcError: `function` failed; for its class, see `raise_on_all_ranks`.
    """
    error: Exception | None = None
    result: T | None = None
    if hvd.rank() == 0:
        try:
            result = function()
        except Exception as failure:  # noqa: BLE001 - raised on all ranks below
            error = failure
    description, result = hvd.broadcast_object((describe_error(error), result), name=name)
    raise_on_all_ranks([description], error)
    return cast("T", result)
