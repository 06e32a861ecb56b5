"""The exceptions and values that report a change of the hosts to a rank of an elastic job.

The module does not import torch, so that it loads fast.
"""

from __future__ import annotations


class HostUpdateResult:
    """The kinds of changes of hosts, as bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name; it is not an error
    """Hosts have changed: the ranks form a new round (a new assignment of ranks) and keep their current state.

    It is raised on all ranks in the same call of `State.commit` or `State.check_host_updates`.

    Args:
        skip_sync: whether ranks were only removed, so that the remaining ranks have equal states and copy none.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have changed; the ranks form a new round")
        self.skip_sync = skip_sync


class LeaveJob(SystemExit):
    """The worker has no rank in the job any more. As a `SystemExit`, it ends the process with status 0."""

    def __init__(self) -> None:
        super().__init__(0)
