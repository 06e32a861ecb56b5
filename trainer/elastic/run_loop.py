"""`hvd.elastic.run`: the loop around a training function that survives the loss of ranks."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from datasvc.trainer.elastic.state import State
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.job import runtime
from datasvc.trainer.optim.wrapper_numbers import raise_counts
from datasvc.trainer.rendezvous.host_update import HostsUpdatedInterrupt
from datasvc.trainer.rendezvous.rendezvous import Rendezvous, open_rendezvous

logger = logging.getLogger(__name__)

_MAX_REPEATS = 4

S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


def run(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], object] | None = None
) -> Callable[Concatenate[S, P], R]:
    """Makes `func(state, ...)` start again, from the last commit, when ranks come, go or die.

    All ranks call the result after `init`; the state is then that of rank 0. When a rank is lost, the others
    restore their last commit; when hosts have come or gone, they keep what they have. They meet anew, ranks and size
    change, the state's reset callbacks run, and `func` is called again, in the same process.

    Any other error of `func` is raised, and unless it is caught it is the death of this rank: the others go on from
    their last commit.

    Args:
        func: takes the state first.
        reset: leaves the job and enters it anew, by `shutdown` and `init`, on every rank; None does just that.

    Raises:
        ValueError: not initialized.
        HorovodInternalError: it came again and again, without a commit in between.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        rendezvous = open_rendezvous(os.environ)
        loop = _Loop(state, rendezvous, reset)
        if rendezvous is None:
            return loop.run(lambda: func(state, *args, **kwargs))
        with rendezvous.notifying(state):
            rendezvous.begin_training()
            result = loop.run(lambda: func(state, *args, **kwargs))
            rendezvous.end_training()
        return result

    return cast("Callable[Concatenate[S, P], R]", wrapper)


class _Loop:
    def __init__(
        self, state: State, rendezvous: Rendezvous | None, reset: Callable[[], object] | None = None
    ) -> None:
        self._state = state
        self._rendezvous = rendezvous
        self._settings = runtime.current_job().engine.settings
        self._reset = reset or self._init_again
        self._should_sync = True
        self._last_failure: tuple[str, int, int] | None = None
        self._num_repeats = 0

    def run(self, train: Callable[[], R]) -> R:
        while True:
            try:
                if self._should_sync:
                    raise_counts()
                    self._state.synchronize()
                return train()
            except HorovodInternalError as error:
                self._check_progress(error)
                logger.warning("back to the last commit: %s", error)
                self._meet(should_sync=True)
                self._state.restore()
            except HostsUpdatedInterrupt as interrupt:
                self._meet(should_sync=not interrupt.skip_sync)
            self._state.on_reset()
            if self._rendezvous is not None:
                # One that has come since the seat may have been forgotten by the reset.
                self._rendezvous.repeat_notice()

    def _check_progress(self, error: HorovodInternalError) -> None:
        """Gives up on an error that a new round does not mend: ranks that disagree would do so for ever."""
        seat = None if self._rendezvous is None else self._rendezvous.seat
        # Where ranks have died in between, these are the cause, and the launcher counts them.
        failure = (str(error), self._state.num_commits, 0 if seat is None else seat.num_deaths)
        self._num_repeats = self._num_repeats + 1 if failure == self._last_failure else 0
        self._last_failure = failure
        if self._num_repeats >= _MAX_REPEATS:
            if self._rendezvous is not None:
                self._rendezvous.report_error(error, ends_job=True)
            raise error

    def _meet(self, *, should_sync: bool) -> None:
        """Leaves the round and enters the next one; deaths meanwhile are the rendezvous's business."""
        rendezvous = self._rendezvous
        if rendezvous is not None:
            rendezvous.serial, rendezvous.wants_sync = self._state.serial, should_sync
        self._reset()
        # The others may want it although this rank does not.
        seat = None if rendezvous is None else rendezvous.seat
        self._should_sync = should_sync if seat is None else seat.needs_sync

    def _init_again(self) -> None:
        runtime.shutdown()
        runtime.init(settings=self._settings)
