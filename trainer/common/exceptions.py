"""The exceptions of ``horovod.common.exceptions``. Loads no torch."""

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.host_update import HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Never raised here, where nothing is built for one version of torch; programs name it in ``except``.

    Args:
        name: of the framework.
        version: that is there.
        installed_version: for which Horovod was built.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} is installed, but this was built for {name} {installed_version}")
        self.name = name
        self.version = version
        self.installed_version = installed_version
