"""Settings of a decode group: the value of a loader's `decode_group` argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from datasvc.errors import ConfigError

MAX_NAME_BYTES: Final = 50
SHARING_FORMAT: Final = 2
"""Format version of a decode group's links and shared memory. All jobs of a group must have the same."""


@dataclass(frozen=True)
class DecodeGroup:
    """A group of jobs on this node that share decoded batches, and limits of how far apart the jobs may run.

    Attributes:
        name: name of the group; jobs of one user with the same name share batches.
        lag: number of batches that a job may be behind the decoding job and still get shared batches. The decoding
            job keeps that many batches in memory, once for all jobs.
        patience: maximum number of waits of a job for jobs that are further behind, for example because these started
            late or write a checkpoint. Each wait is for one batch. After every eight batches, a job gets one wait
            back. 0: a job never waits.
        when_behind: "alone": a job that is too far behind decodes the same batches in its own process until it
            catches up; "raise": it gets a `LagError`.
        silent_s: seconds that a job waits for a batch that another job decodes. After this time, the waiting job
            decodes the batch itself.

    Raises:
        ConfigError: a value is out of range.
    """

    name: str
    lag: int = 6
    patience: int = 64
    when_behind: Literal["alone", "raise"] = "alone"
    silent_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < len(self.name.encode()) <= MAX_NAME_BYTES:
            raise ConfigError(
                f"the name of a decode group is {self.name!r}; expected 1 to {MAX_NAME_BYTES} bytes in UTF-8"
            )
        if self.lag < 1:
            raise ConfigError(f"lag is {self.lag}; expected at least 1 batch")
        if self.patience < 0:
            raise ConfigError(f"patience is {self.patience}; expected at least 0 batches")
        if self.when_behind not in ("alone", "raise"):
            raise ConfigError(f"when_behind is {self.when_behind!r}; expected 'alone' or 'raise'")
        if not self.silent_s > 0:
            raise ConfigError(f"silent_s is {self.silent_s}; expected a number of seconds above 0")

    @property
    def common(self) -> dict[str, Any]:
        """The settings that all jobs of a group must have in common, JSON values by name."""
        return {"sharing_format": SHARING_FORMAT, "lag": self.lag, "patience": self.patience}
