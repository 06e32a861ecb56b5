"""The exception for failures of a distributed job.

An error of the calling process alone is a `ValueError`: an invalid argument, a name whose operation is still in
flight, or a missing call of `init`. A sum or product of integers that does not fit their dtype is an `OverflowError`
on every rank. A failure that affects the whole job is a `HorovodInternalError`.
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective operation failed: ranks disagree about it, or a rank has left, exited or cannot be reached.

    After a disagreement the trainer stays usable. After the loss of a rank, every later operation raises this error
    until `shutdown()` and `init()` are called.
    """
