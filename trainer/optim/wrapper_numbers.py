"""Gives each distributed optimizer and `SyncBatchNorm` module a number, which is part of the names of its operations.

An object must have the same number on all ranks. The numbers count creations, not live objects, because garbage
collection happens at different times on different ranks. In an elastic job, ranks that start later have created fewer
objects, so all ranks raise their counts to the maximum whenever they synchronize their states.
"""

from __future__ import annotations

from collections import Counter

from datasvc.trainer.optim.broadcast_state import allgather_object

_counts: Counter[str] = Counter()


def next_number(kind: str) -> int:
    """Return the number of a new object of a kind, such as "adasum"; every rank calls this in the same order.

    Each kind is numbered from 0.
    """
    number = _counts[kind]
    _counts[kind] += 1
    return number


def raise_counts() -> None:
    """Raise the counts to the maximum over the ranks. A collective: every rank calls this."""
    for counts in allgather_object(dict(_counts), name="wrapper_numbers"):
        for kind, count in counts.items():
            _counts[kind] = max(_counts[kind], count)
