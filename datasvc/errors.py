"""Exceptions of datasvc: one tree, with an exit code for the command line.

    DatasvcError                     base class of all errors below
    |-- ConfigError                  a setting or an argument is invalid: correct it and call again
    |   |-- MissingPackageError      an extra of datasvc is not installed: the message has the command
    |   `-- StateMismatchError       a saved position belongs to other data or another order
    |-- NotFoundError                a name, version, tag or file does not exist: the message lists what exists
    |-- ConflictError                another writer committed first: read the new head, decide, and retry
    |   `-- SourceChangedError       a source file changed during an ingest: run the same command again
    |-- UnknownOutcomeError          it is unknown whether a commit happened: read the log before a retry
    |-- CorruptDataError             stored bytes do not match their digest or format: they are never returned
    |-- BadSampleError               a sample cannot be decoded: repair it, or configure bad samples to be skipped
    |-- NotFiniteError               a training has diverged: continue an earlier version, with other settings
    |-- CacheFullError               the cache budget is too small: the message states the bytes needed
    |-- BusyError                    an earlier save still runs: save less often, or queue saves (`overlap=queue`)
    |-- LagError                     a job fell too far behind its decode group, and its setting is to raise
    |-- DeviceError                  a GPU failed or is out of memory: reduce its load, or decode on the CPU
    `-- UnavailableError             a store did not respond after all retries: try again later

`UnreadableVersionWarning` is a warning, not an error: a listing leaves out a version that cannot be read.

Exceptions of other libraries (OSError, ArrowInvalid, lmdb.Error) are converted once, where they are caught.
A message states the operation, its target, what was expected, what was found, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class DatasvcError(Exception):
    """Base class of all errors that datasvc raises; `exit_code` is the exit status of the command line."""

    exit_code: ClassVar[int] = 1


class ConfigError(DatasvcError, ValueError):
    """A setting or an argument is invalid or contradicts another one. It is raised before any side effect."""

    exit_code = 2


class NotFoundError(DatasvcError, LookupError):
    """A name, version, tag, object or file does not exist; the message lists the existing ones."""


class ConflictError(DatasvcError):
    """Another writer committed first, and no retries are left. No part of this commit is visible."""

    exit_code = 4


class SourceChangedError(ConflictError):
    """A source file changed after an ingest listed it. No part of the commit is visible."""


class UnknownOutcomeError(DatasvcError):
    """A commit failed at a point where it may have happened, and the log could not be read to find out."""

    exit_code = 5


class CorruptDataError(DatasvcError):
    """Stored bytes do not match their digest or format. No data is returned; restore the bytes from another copy."""

    exit_code = 3


class BadSampleError(DatasvcError):
    """A sample cannot be decoded; the message gives the reason."""


class NotFiniteError(DatasvcError):
    """A training has diverged: its loss or its weights are NaN or infinite. Continue an earlier version of it."""


class CacheFullError(DatasvcError):
    """The cache budget is too small for the request, even after the eviction of all objects that may be evicted."""


class StateMismatchError(ConfigError):
    """A saved loader state belongs to another data-set version or another order; the message contains both."""


class MissingPackageError(ModuleNotFoundError, ConfigError):
    """A package that a feature needs is not installed; the message has the command that installs it.

    A ModuleNotFoundError too, as programs expect of an import. `name` is the module.
    """


class BusyError(DatasvcError):
    """A save was refused because an earlier one still runs. Training can continue and save later."""


class LagError(DatasvcError):
    """A job fell too far behind the other jobs of its decode group. Iterate over the loader again to retry."""


class DeviceError(DatasvcError):
    """A GPU or its driver failed, or it is out of memory. The cause is not a bad sample; the message has a remedy."""


class UnavailableError(DatasvcError):
    """A store did not respond after all retries; the same call may succeed later."""

    exit_code = 5


class UnreadableVersionWarning(UserWarning):
    """A listing leaves out one version, or one tag, because its entry cannot be read; the message says what to do.

    Attributes:
        version: name with version, such as "digits-cnn@3", or with tag.
    """

    def __init__(self, version: str, message: str) -> None:
        super().__init__(version, message)
        self.version = version

    def __str__(self) -> str:
        return str(self.args[1])

    def to_dict(self) -> dict[str, object]:
        """Return the version as lists in JSON have it: `name`, `version`, and the message as `unreadable`."""
        name, _, number = self.version.partition("@")  # `number` is a tag if only the tag cannot be read
        return {"name": name, "version": int(number) if number.isdecimal() else number, "unreadable": str(self)}
