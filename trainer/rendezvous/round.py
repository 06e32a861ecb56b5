"""Joins the next round of an elastic job: requests a rank, and connects to the other members of the round.

A round is a period with a fixed assignment of ranks; `job.runtime` joins one in each `init`.
"""

from __future__ import annotations

import datetime as dt
import logging
import sys

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _world

from datasvc.trainer.engine.execution.transport import GroupTransport, Transport
from datasvc.trainer.env.environment import EngineSettings, RankPlacement, find_gpu_uuid
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

# The limits of a wait for a key and of a collective, while the members of a round connect, all at the same time. They
# are short: if a member dies while it connects, the other members wait for a few times the second limit.
_KEY_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 10.0
# The job ends after this many consecutive failed rounds: the likely cause is then a network that blocks connections.
_MAX_ROUNDS = 5


def join_round(rendezvous: Rendezvous, settings: EngineSettings) -> tuple[RankPlacement, Transport]:
    """Join a round, and return when all its members have connected.

    With more than one rank, this creates the default process group.

    Raises:
        HorovodInternalError: the members could not connect in several consecutive rounds; the driver gets a report.
        LeaveJob: there is no rank for this process any more.
        ValueError: a default process group exists already.
    """
    if dist.is_initialized():
        raise ValueError(
            "in an elastic job hvd.init() creates the default process group, but one exists already; remove the call "
            "of torch.distributed.init_process_group"
        )
    for attempt in range(1, _MAX_ROUNDS + 1):
        assignment = rendezvous.join_round()
        if assignment.placement.size == 1:
            # A single rank needs no connection.
            return assignment.placement, Transport()
        try:
            store = rendezvous.round_store(assignment, timeout_s=min(settings.timeout_s, _KEY_TIMEOUT_S))
            return assignment.placement, _connect(assignment.placement, settings, store)
        except RuntimeError as error:
            # A member died while it connected. The driver detects that and begins another round.
            logger.warning("round %d failed before all ranks had connected: %s", assignment.round_number, error)
            if attempt == _MAX_ROUNDS:
                raise _report_failure(rendezvous, assignment.placement, error) from error
    raise AssertionError("the last attempt returns or raises")


def _report_failure(rendezvous: Rendezvous, placement: RankPlacement, reason: RuntimeError) -> HorovodInternalError:
    """Report to the driver that the job must end, and return the error to raise."""
    error = HorovodInternalError(
        f"rank {placement.rank} could not connect to the other ranks in {_MAX_ROUNDS} consecutive rounds; check "
        f"GLOO_SOCKET_IFNAME and the firewall between the hosts. Last error: {reason}"
    )
    rendezvous.report_error(error, ends_job=True)
    return error


def _connect(placement: RankPlacement, settings: EngineSettings, store: Store) -> Transport:
    """Connect to the other members of the round; on an error, leave no process group behind."""
    gpu = find_gpu_uuid(placement)
    timeout_s = min(settings.timeout_s, _CONNECT_TIMEOUT_S)
    # torch numbers groups, including failed ones, and the numbers must be equal on all ranks. The ranks may have had
    # different numbers of failures, so start at 0.
    _world.group_count = 0
    previous_hook = sys.excepthook
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=store,
            rank=placement.rank,
            world_size=placement.size,
            timeout=dt.timedelta(seconds=timeout_s),
        )
        transport = GroupTransport(
            settings, gpu=gpu, local_size=placement.local_size, node=placement.cross_rank, timeout_s=timeout_s
        )
        # Once all members are connected, the limit of the settings applies.
        transport.set_timeout(transport.settings.timeout_s)
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    finally:
        # torch installs an exception hook that prefixes errors with the rank. Each round would add another one.
        sys.excepthook = previous_hook
    return transport
