"""Detection of stalls: operations that some ranks have not submitted for a long time.

Without this detection, a missing submission would look like a hang without a cause. The module reads no clock: the
engine passes the time.
"""

from __future__ import annotations

from collections.abc import Mapping

from datasvc.trainer.engine.negotiation.agreement import name_ranks
from datasvc.trainer.engine.negotiation.requests import Key


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

    def check(self, now_s: float, missing: Mapping[Key, tuple[int, ...]]) -> tuple[list[str], str]:
        """Return the warnings that are due, and the reason why the job must end; an empty reason if it can continue.

        Warnings about one operation are `warning_s` apart.

        Args:
            now_s: time of this call, on a monotonic clock.
            missing: for each pending operation, the ranks that have not submitted it.
        """
        # Delete completed operations, so that a later operation of the same name starts at zero.
        for key in self._waiting_since.keys() - missing.keys():
            self.restart(key)
        warnings, failure = [], ""
        for key, ranks in missing.items():
            waited_s = now_s - self._waiting_since.setdefault(key, now_s)
            if self._warning_s and now_s - self._last_warning.setdefault(key, now_s) >= self._warning_s:
                self._last_warning[key] = now_s
                warnings.append(_describe(key, ranks, waited_s))
            if self._shutdown_s and waited_s >= self._shutdown_s and not failure:
                failure = f"{_describe(key, ranks, waited_s)}; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends the job"
        return warnings, failure


def _describe(key: Key, ranks: tuple[int, ...], waited_s: float) -> str:
    return f"{key.describe()} has waited {waited_s:.0f} s for {name_ranks(ranks)}, which did not submit it"
