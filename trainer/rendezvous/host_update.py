"""How a rank hears that hosts have come or gone. Without torch: the worker of `datasvc.trainer.run` imports it."""

from __future__ import annotations


class HostUpdateResult:
    """What has changed, as bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name; it is no error
    """Raised on every rank at once by `check_host_updates`: the ranks meet anew, with the state that they have.

    Args:
        skip_sync: whether ranks have only gone, so that all that stay have the same state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have changed; the ranks meet anew")
        self.skip_sync = skip_sync


class LeaveJob(SystemExit):
    """Raised in a worker for which there is no place any more: its process ends with status 0."""

    def __init__(self) -> None:
        super().__init__(0)
