"""Detection of stalls: operations that some ranks have not submitted for a long time.

Without this detection, a missing submission would look like a hang without a cause. The module reads no clock: the
engine passes the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from datasvc.trainer.engine.negotiation.agreement import name_ranks
from datasvc.trainer.engine.negotiation.requests import Key


@dataclass(frozen=True)
class StalledOperation:
    """An operation that waits for ranks.

    Attributes:
        key: key of the operation.
        ranks: ranks that have not submitted it.
        waited_s: seconds since the first rank has submitted it.
    """

    key: Key
    ranks: tuple[int, ...]
    waited_s: float

    def describe(self) -> str:
        """Return this as text, for messages."""
        return (
            f"{self.key.describe()} has waited {self.waited_s:.0f} s for {name_ranks(self.ranks)}, which did not "
            "submit it"
        )


class StallWatch:
    """The waiting times of the pending operations (only some ranks submitted them), and their last warnings.

    Args:
        warning_s: seconds between two warnings about one operation; 0 for no warnings.
        shutdown_s: seconds after which the job ends; 0 for never.
    """

    def __init__(self, warning_s: float, shutdown_s: float = 0.0) -> None:
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self._last_warning: dict[Key, float] = {}  # before the first warning, the beginning of the wait
        self._waiting_since: dict[Key, float] = {}

    def restart(self, key: Key) -> None:
        """Delete the waiting time of an operation, so that it starts at zero in the next check."""
        self._waiting_since.pop(key, None)
        self._last_warning.pop(key, None)

    def check(self, now_s: float, missing: Mapping[Key, tuple[int, ...]]) -> tuple[list[StalledOperation], str]:
        """Return the operations to warn of, and the reason why the job must end; an empty reason if it can continue.

        Warnings about one operation are `warning_s` apart.

        Args:
            now_s: time of this call, on a monotonic clock.
            missing: for each pending operation, the ranks that have not submitted it.
        """
        # Delete completed operations, so that a later operation of the same name starts at zero.
        for key in self._waiting_since.keys() - missing.keys():
            self.restart(key)
        stalled, failure = [], ""
        for key, ranks in missing.items():
            waiting = StalledOperation(key, ranks, now_s - self._waiting_since.setdefault(key, now_s))
            if self._warning_s and now_s - self._last_warning.setdefault(key, now_s) >= self._warning_s:
                self._last_warning[key] = now_s
                stalled.append(waiting)
            if self._shutdown_s and waiting.waited_s >= self._shutdown_s and not failure:
                failure = f"{waiting.describe()}; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends the job"
        return stalled, failure
