"""When an operation that some ranks have not submitted is worth a warning, or the job's end.

Pure: the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from datasvc.trainer.engine.negotiation.agreement import name_ranks
from datasvc.trainer.engine.negotiation.requests import Key


@dataclass(frozen=True)
class StallDecision:
    """What to say now.

    Attributes:
        warnings: one for each operation that is due.
        complaint: why the job ends; empty if it does not.
    """

    warnings: tuple[str, ...] = ()
    complaint: str = ""


class StallWatch:
    """Remembers since when each operation waits, and when it was last reported.

    Args:
        warning_s: seconds between two warnings of one operation; 0 is never.
        shutdown_s: seconds after which the job ends; 0 is never.
    """

    def __init__(self, warning_s: float, shutdown_s: float = 0.0) -> None:
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self._quiet_since: dict[Key, float] = {}
        self._waiting_since: dict[Key, float] = {}

    def restart(self, key: Key) -> None:
        """Counts the wait for an operation from the next check on."""
        self._waiting_since.pop(key, None)
        self._quiet_since.pop(key, None)

    def check(self, now_s: float, missing: Mapping[Key, tuple[int, ...]]) -> StallDecision:
        """What is due now; the same operation again only after another `warning_s`.

        Args:
            now_s: seconds of any clock that does not go back.
            missing: for each pending operation, the ranks that have not submitted it.
        """
        for key in self._waiting_since.keys() - missing.keys():
            self.restart(key)
        warnings, complaint = [], ""
        for key, ranks in missing.items():
            waited_s = now_s - self._waiting_since.setdefault(key, now_s)
            if self._warning_s and now_s - self._quiet_since.setdefault(key, now_s) >= self._warning_s:
                self._quiet_since[key] = now_s
                warnings.append(_describe(key, ranks, waited_s))
            if self._shutdown_s and waited_s >= self._shutdown_s and not complaint:
                complaint = f"{_describe(key, ranks, waited_s)}; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends the job"
        return StallDecision(tuple(warnings), complaint)


def _describe(key: Key, ranks: tuple[int, ...], waited_s: float) -> str:
    return f"{key.describe()} has waited {waited_s:.0f} s for {name_ranks(ranks)}, which did not submit it"
