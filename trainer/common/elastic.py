"""The names of ``horovod.common.elastic``. The loop is ``trainer.elastic.run``: it meets the other ranks itself."""

from trainer.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from trainer.elastic.host_update import HostUpdateResult
from trainer.elastic.state import ObjectState, State

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State"]
