"""Limits on the membership of an elastic job, read once and checked; and the hosts that may get no new workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from datasvc.trainer.launch.ranks.job import ElasticOptions, LaunchJob

# Horovod's variable takes precedence over an older one of this trainer.
_TIMEOUT_VARIABLES = ("HOROVOD_ELASTIC_TIMEOUT", "HVD_ELASTIC_TIMEOUT")
_DEFAULT_TIMEOUT_S = 600.0
_HANG_VARIABLE = "HVD_ELASTIC_HANG_TIMEOUT"
_DEFAULT_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the membership of an elastic job.

    Attributes:
        first_num_ranks: number of ranks that the first round waits for.
        min_num_ranks: minimum number of ranks of a round.
        max_num_ranks: maximum number of ranks; further slots stay empty. None for no limit.
        elastic_timeout_s: maximum time to wait for slots while there are too few; then the job ends.
        start_timeout_s: maximum time for a worker to start, and again to call `init` while other workers wait for it;
            a worker that takes longer is terminated. None for no limit.
        hang_timeout_s: maximum time for a worker to leave a round that has ended; then the worker is terminated.
        reset_limit: maximum number of rounds after the first; None for no limit.
        cooldown_range_s: see `Blacklist`.
        hosts_can_change: whether host discovery may find more hosts.

    Raises:
        ValueError: the numbers of ranks contradict each other, or the reset limit is negative.
    """

    first_num_ranks: int = 1
    min_num_ranks: int = 1
    max_num_ranks: int | None = None
    elastic_timeout_s: float = 600.0
    start_timeout_s: float | None = None
    hang_timeout_s: float = _DEFAULT_TIMEOUT_S
    reset_limit: int | None = None
    cooldown_range_s: tuple[float, float] | None = None
    hosts_can_change: bool = False

    def __post_init__(self) -> None:
        max_num_ranks = math.inf if self.max_num_ranks is None else self.max_num_ranks
        if not 1 <= self.min_num_ranks <= self.first_num_ranks <= max_num_ranks:
            numbers = [f"--min-num-proc {self.min_num_ranks}", f"-np {self.first_num_ranks}"]
            if self.max_num_ranks is not None:
                numbers.append(f"--max-num-proc {self.max_num_ranks}")
            raise ValueError(
                f"{', '.join(numbers)}: expected numbers of at least 1 that do not decrease in this order"
            )
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ValueError(f"the reset limit must not be negative, but is {self.reset_limit}")


def plan_limits(job: LaunchJob, options: ElasticOptions, environ: Mapping[str, str]) -> Limits:
    """Return the limits of a job; an elastic timeout in the options takes precedence over the environment.

    Raises ValueError: the numbers contradict each other, or a variable is not a number of seconds.
    """
    timeout_s = options.elastic_timeout_s
    if timeout_s is None:
        name = next((name for name in _TIMEOUT_VARIABLES if name in environ), _TIMEOUT_VARIABLES[0])
        timeout_s = _seconds(environ, name, _DEFAULT_TIMEOUT_S)
    return Limits(
        first_num_ranks=job.num_ranks,
        min_num_ranks=options.min_num_ranks,
        max_num_ranks=options.max_num_ranks,
        elastic_timeout_s=timeout_s,
        start_timeout_s=job.start_timeout_s,
        # The user may set this variable for the ranks only, so read their variables too. The timeout of collectives
        # is no substitute, because a healthy rank may work longer between two collectives.
        hang_timeout_s=_seconds({**environ, **job.variables}, _HANG_VARIABLE, _DEFAULT_TIMEOUT_S),
        reset_limit=options.reset_limit,
        cooldown_range_s=options.cooldown_range_s,
        hosts_can_change=options.discovery_script is not None,
    )


def read_discovery_interval_s(environ: Mapping[str, str]) -> float:
    """Return the seconds between two runs of the discovery script. Raise ValueError: not a number above 0."""
    return _seconds(environ, "HVD_DISCOVERY_INTERVAL", _DEFAULT_INTERVAL_S)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        seconds = float(environ.get(name, default))
    except ValueError:
        seconds = -1.0  # out of range, so that one message serves both errors
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be a number of seconds above 0, not {environ[name]!r}")
    return seconds


class Blacklist:
    """Hosts that get no new workers after a failure, permanently or for a time that doubles with each failure.

    Args:
        cooldown_range_s: time for which the first failure blocks a host, and its maximum; None to block permanently.

    Raises:
        ValueError: the minimum is negative or larger than the maximum.
    """

    def __init__(self, cooldown_range_s: tuple[float, float] | None = None) -> None:
        if cooldown_range_s is not None and not 0 <= cooldown_range_s[0] <= cooldown_range_s[1]:
            raise ValueError(f"the cooldown range must be 0 <= minimum <= maximum, not {cooldown_range_s}")
        self._range_s = cooldown_range_s
        self._num_failures: dict[str, int] = {}
        self._blocked_until_s: dict[str, float] = {}

    def block(self, host: str, now_s: float) -> float:
        """Record a failure on a host; return the time from which it may get workers again, or infinity."""
        # Workers that fail together count as one failure: further failures on a blocked host are not counted.
        if not self.is_blocked(host, now_s):
            count = self._num_failures[host] = self._num_failures.get(host, 0) + 1
            self._blocked_until_s[host] = now_s + self._cooldown_s(count)
        return self._blocked_until_s[host]

    def is_blocked(self, host: str, now_s: float) -> bool:
        """Return whether the host gets no new workers at `now_s`."""
        return now_s < self._blocked_until_s.get(host, -math.inf)

    def next_release_s(self, now_s: float) -> float | None:
        """Return the next time when a blocked host may get workers again; None if no blocked host ever may."""
        times = [until for until in self._blocked_until_s.values() if now_s < until < math.inf]
        return min(times, default=None)

    def _cooldown_s(self, num_failures: int) -> float:
        if self._range_s is None:
            return math.inf
        minimum_s, maximum_s = self._range_s
        # The exponent is limited, because a float overflows with an error.
        return min(maximum_s, minimum_s * 2.0 ** min(num_failures - 1, 60))
