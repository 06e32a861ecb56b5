"""Numbers for the names under which an optimizer or a module of each rank meets its like on the others.

Counted, and not taken from what is alive: when something dropped is gone depends on the collector, and differs by
rank. In an elastic job those that stay have made things before that newcomers have not, so the ranks raise their
counts to the highest whenever they bring their states in line.
"""

from collections import Counter

_counts: Counter[str] = Counter()


def take_number(kind: str) -> int:
    """The next number of this kind. Every rank calls this in the same order."""
    number = _counts[kind]
    _counts[kind] += 1
    return number


def raise_counts() -> None:
    """Goes on from the highest count of any rank. A collective: every rank calls this."""
    from datasvc.trainer.optim.broadcast_state import allgather_object

    for counts in allgather_object(dict(_counts), name="wrapper_numbers"):
        for kind, count in counts.items():
            _counts[kind] = max(_counts[kind], count)
