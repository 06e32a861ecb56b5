"""The exceptions of `horovod.common.exceptions`. Does not import torch."""

from __future__ import annotations

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """The framework's version differs from the one that Horovod was built for.

    The trainer never raises it, because nothing is compiled for one version of torch. It exists because programs name
    it in `except`.

    Args:
        name: name of the framework.
        version: version of the framework that is installed.
        installed_version: version of the framework that Horovod was built for. Horovod chose this misleading name.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} is installed, but Horovod was built for {name} {installed_version}")
        self.name = name
        self.version = version
        self.installed_version = installed_version
