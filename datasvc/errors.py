"""Every error that datasvc raises on purpose, in one tree.

    DatasvcError                     catch this to catch them all
    |-- ConfigError                  a setting or argument is wrong: correct it and call again
    |-- NotFoundError                a name, version, tag or file is not there: the message says what is
    |-- ConflictError                somebody else committed first: look at the new head, decide, retry
    |   `-- SourceChangedError       a source changed while it was read: run the same command again
    |-- UnknownOutcomeError          a commit may or may not have happened: read the log before retrying
    |-- CorruptDataError             bytes differ from their digest, or do not parse: never used, never served
    |-- BadSampleError               one sample cannot be decoded: fix it, or ask for bad samples to be skipped
    |-- CacheFullError               the node's budget cannot hold what is asked: the message says how much it needs
    |-- StateMismatchError           a saved position belongs to other data or another order
    |-- BusyError                    a save goes on, and overlap is refused: save less often, or let saves queue
    |-- LagError                     this job fell behind those it shares decoding with, and asked to be told so
    |-- DeviceError                  a GPU failed or has no memory left: use less of it, or decode on the CPU
    `-- UnavailableError             a store did not answer after retries: try again later

Foreign exceptions (OSError of a store, ArrowInvalid, lmdb.Error ...) are translated once, where they enter.
A message says what was tried, on what, what was expected and found, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class DatasvcError(Exception):
    """Base of all errors raised by datasvc.

    Attributes:
        exit_code: status with which the command line ends when this error reaches it.
    """

    exit_code: ClassVar[int] = 1


class ConfigError(DatasvcError, ValueError):
    """A setting or argument is out of range or contradicts another; raised before anything is done."""

    exit_code = 2


class NotFoundError(DatasvcError, LookupError):
    """A name, version, tag, object or file does not exist; the message lists what does."""


class ConflictError(DatasvcError):
    """Another writer committed first and the bounded retries are used up; nothing of this commit is visible."""

    exit_code = 4


class SourceChangedError(ConflictError):
    """A file of a source is not what its listing said: it changed meanwhile. Nothing of it is visible."""


class UnknownOutcomeError(DatasvcError):
    """A commit failed in a way that leaves open whether it happened, and the log could not be read back."""

    exit_code = 5


class CorruptDataError(DatasvcError):
    """Stored bytes do not match their digest or format. The caller gets no data; restore another copy."""

    exit_code = 3


class BadSampleError(DatasvcError):
    """A sample cannot be decoded; the message names it."""


class CacheFullError(DatasvcError):
    """The cache budget cannot hold what is asked for even after evicting all that may be evicted."""


class StateMismatchError(ConfigError):
    """A saved loader state belongs to another data-set version or order; the message names both."""


class BusyError(DatasvcError):
    """A save was refused because an earlier one goes on; the training may go on and save later."""


class LagError(DatasvcError):
    """A job that shares its decoding fell too far behind the others; iterating again tries again."""


class DeviceError(DatasvcError):
    """A GPU or its driver failed, or it has no memory left; the message says what to change. No sample is bad."""


class UnavailableError(DatasvcError):
    """A store did not answer, after its own retries; the same call may succeed later."""

    exit_code = 5
