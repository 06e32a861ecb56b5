"""The names of ``horovod.common.elastic``."""

from trainer.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from trainer.elastic.host_update import HostUpdateResult
from trainer.elastic.run_loop import run as run_fn
from trainer.elastic.state import ObjectState, State

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]
