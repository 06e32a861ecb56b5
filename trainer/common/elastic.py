"""The public names of `horovod.common.elastic`."""

from __future__ import annotations

from datasvc.trainer.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from datasvc.trainer.elastic.run_loop import run as run_fn
from datasvc.trainer.elastic.state import ObjectState, State
from datasvc.trainer.rendezvous.messages import HostUpdateResult

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]
