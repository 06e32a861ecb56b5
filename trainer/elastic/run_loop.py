"""`hvd.elastic.run`: calls a training function again after ranks were lost, added or removed.

Each call runs in a new round: a period in which the ranks of the job and their numbers do not change.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import traceback
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from datasvc.trainer.elastic.state import State
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.job import runtime
from datasvc.trainer.optim.parameter_names import raise_counts
from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt
from datasvc.trainer.rendezvous.rendezvous import Rendezvous, open_rendezvous

logger = logging.getLogger(__name__)

# A failure that is repeated this many times, without a commit in between, is raised.
_MAX_REPEATS = 4

S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


def run(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], object] | None = None
) -> Callable[Concatenate[S, P], R]:
    """Wrap `func(state, ...)` so that it is called again when ranks join, leave or are lost.

    All ranks call the wrapped function after `init`; it first copies the state of rank 0 to all ranks. When a rank is
    lost, the other ranks restore their last commit; when hosts are added or removed, the ranks keep their current
    state. In both cases the ranks form a new round, in which rank and size may differ. The reset callbacks of the
    state run, and `func` is called again in the same process.

    Any other exception of `func` propagates. If the program does not catch it, this rank ends, and the others
    continue from their last commit.

    Args:
        func: training function; its first argument is the state.
        reset: function, called on every rank, that leaves the job and joins it again; None for `shutdown` and `init`.

    Raises:
        ValueError: the trainer is not initialized.
        HorovodInternalError: the same error occurred several times without a commit in between.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        rendezvous = open_rendezvous(os.environ)
        loop = _Loop(state, rendezvous, reset)
        if rendezvous is None:
            return loop.run(lambda: func(state, *args, **kwargs))
        with rendezvous.notifying(state.on_hosts_updated):
            rendezvous.begin_training()
            result = loop.run(lambda: func(state, *args, **kwargs))
            # Not called after an exception: the driver then warns if the process still exits with status 0.
            rendezvous.end_training()
        return result

    return cast("Callable[Concatenate[S, P], R]", wrapper)


class _Loop:
    """Calls the training function until it returns, and joins a new round before each further call."""

    def __init__(
        self, state: State, rendezvous: Rendezvous | None, reset: Callable[[], object] | None = None
    ) -> None:
        self._state = state
        self._rendezvous = rendezvous
        self._settings = runtime.current_job().engine.settings
        self._reset = reset or self._init_again
        self._should_sync = True  # before the first call, the ranks may have different initial values
        self._last_failure: tuple[str, int, int] | None = None  # message, number of commits, number of deaths
        self._num_repeats = 0

    def run(self, train: Callable[[], R]) -> R:
        """Call `train` until it returns, and return its result."""
        is_new_round = False  # whether the state has not yet adapted to the current round
        while True:
            try:
                if is_new_round:
                    # A rank can be lost here too, because `on_reset` may wait for the other ranks.
                    self._state.on_reset()
                    if self._rendezvous is not None:
                        # `on_reset` may have discarded a notice of changed hosts that arrived after the assignment.
                        self._rendezvous.repeat_notice()
                if self._should_sync:
                    # Later operations have names that contain counts of optimizers and modules. These names must be
                    # equal on all ranks, so make the counts equal first.
                    raise_counts()
                    self._state.synchronize()
                is_new_round = False
                return train()
            except HorovodInternalError as error:
                self._check_progress(error)
                logger.warning("restoring the last commit: %s", error)
                _clear_frames(error)
                self._join_next_round(should_sync=True)
                self._state.restore()
            except HostsUpdatedInterrupt as interrupt:
                # An interrupt before the synchronization of this round must not skip it.
                is_unsynced = is_new_round and self._should_sync
                self._join_next_round(should_sync=is_unsynced or not interrupt.skip_sync)
            is_new_round = True

    def _check_progress(self, error: HorovodInternalError) -> None:
        """Raise the error if it has occurred too often in a row: a new round does not repair it."""
        assignment = None if self._rendezvous is None else self._rendezvous.assignment
        # After another commit or death, the same message counts as a new failure; the launcher limits the deaths.
        failure = (str(error), self._state.num_commits, 0 if assignment is None else assignment.num_deaths)
        self._num_repeats = self._num_repeats + 1 if failure == self._last_failure else 0
        self._last_failure = failure
        if self._num_repeats >= _MAX_REPEATS:
            if self._rendezvous is not None:
                self._rendezvous.report_error(error, ends_job=True)
            raise error

    def _join_next_round(self, *, should_sync: bool) -> None:
        """Leave the round and join the next one; the rendezvous handles ranks that die in the meantime."""
        rendezvous = self._rendezvous
        if rendezvous is not None:
            rendezvous.serial, rendezvous.wants_sync = self._state.serial, should_sync
        self._reset()
        # Another rank may need a synchronization although this rank does not.
        assignment = None if rendezvous is None else rendezvous.assignment
        self._should_sync = should_sync if assignment is None else assignment.needs_sync

    def _init_again(self) -> None:
        runtime.shutdown()
        runtime.init(settings=self._settings)


def _clear_frames(error: BaseException) -> None:
    """Delete what the functions that an error has ended had in their variables, such as models and process groups.

    A connection is closed with the last reference to its group. Until then, another rank would wait in a collective
    for this one, although this one has left the round.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    gc.collect()  # models have cycles
