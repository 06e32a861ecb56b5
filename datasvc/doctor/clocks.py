"""Compares clocks of stores and nodes, which report whole seconds, with the one of this machine."""

from __future__ import annotations

from typing import Final

from datasvc.doctor.finding import Finding

_LARGE_S: Final = 5.0
# S3 refuses requests that are older, and `gc` refuses to run at an hour.
_TOO_LARGE_S: Final = 900.0


def examine_clock(check: str, before_s: float, theirs_s: float, after_s: float) -> Finding:
    """Return whether a clock agrees with the one of this machine.

    Args:
        check: whose clock it is.
        before_s: time of this machine before the request, in seconds since 1970.
        theirs_s: time in the answer, rounded down to a second or not.
        after_s: time of this machine after the answer.
    """
    difference_s = clock_difference_s(before_s, theirs_s, after_s)
    if abs(difference_s) < _LARGE_S:
        return Finding(check, "ok", f"within {_LARGE_S:.0f} s of the clock of this machine")
    order = "ahead of" if difference_s > 0 else "behind"
    text = f"{abs(difference_s):.0f} s {order} the clock of this machine"
    advice = "synchronize the clocks of both machines, for example with chrony"
    return Finding(check, "problem" if abs(difference_s) >= _TOO_LARGE_S else "warning", text, advice)


def clock_difference_s(before_s: float, theirs_s: float, after_s: float) -> float:
    """Return the smallest difference, theirs minus ours, that explains an answer; 0 if equal clocks do."""
    if theirs_s > after_s:
        return theirs_s - after_s
    return min(0.0, theirs_s + 1 - before_s)
