"""Enters the next round of an elastic job: asks for a place, and connects to the other members."""

from __future__ import annotations

import datetime as dt
import logging
import sys

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _world

from datasvc.trainer.engine.execution.transport import GroupTransport, LoopbackTransport, Transport
from datasvc.trainer.env.engine_settings import EngineSettings
from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.env.gpus import name_own_gpu
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

# Members of a round have all asked for it, so they come at once. One that dies while it connects holds the others up
# for some times the second.
_MEET_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 10.0
# Deaths do not come in so many rounds one after the other; what does is a network that lets nobody through.
_MAX_ROUNDS = 5


def join_round(rendezvous: Rendezvous, settings: EngineSettings) -> tuple[RankPlacement, Transport]:
    """Returns once this process is in a round in which all members have connected.

    It makes the default process group, if there is more than one rank.

    Raises:
        HorovodInternalError: the members could not connect, in several rounds one after the other; the driver knows.
        LeaveJob: there is no place for this process any more.
        ValueError: there is a default process group already.
    """
    if dist.is_initialized():
        raise ValueError("in an elastic job hvd.init() makes the default process group, but there is one already")
    for attempt in range(1, _MAX_ROUNDS + 1):
        seat = rendezvous.join_round()
        if seat.place.size == 1:
            return seat.place, LoopbackTransport()
        try:
            store = rendezvous.round_store(seat, timeout_s=min(settings.timeout_s, _MEET_TIMEOUT_S))
            return seat.place, _connect(seat.place, settings, store)
        except RuntimeError as error:
            # Someone has died on the way. The driver knows, or will, and makes another round.
            logger.warning("round %d did not come about: %s", seat.round_number, error)
            if attempt == _MAX_ROUNDS:
                raise _give_up(rendezvous, seat.place, error) from error
    raise AssertionError("the last attempt returns or raises")


def _give_up(rendezvous: Rendezvous, place: RankPlacement, reason: RuntimeError) -> HorovodInternalError:
    error = HorovodInternalError(
        f"rank {place.rank} could not connect to the other ranks in {_MAX_ROUNDS} rounds, one after the other; is "
        f"GLOO_SOCKET_IFNAME right, and does the network let them through? The last time: {reason}"
    )
    rendezvous.report_error(error, ends_job=True)
    return error


def _connect(place: RankPlacement, settings: EngineSettings, store: Store) -> Transport:
    gpu = name_own_gpu(place)
    timeout_s = min(settings.timeout_s, _CONNECT_TIMEOUT_S)
    # torch names groups by counting, and counts those that did not come about: others may have had fewer of these.
    _world.group_count = 0
    hook = sys.excepthook
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=dt.timedelta(seconds=timeout_s),
        )
        transport = GroupTransport(settings, gpu=gpu, local_size=place.local_size, timeout_s=timeout_s)
        transport.set_timeout(transport.settings.timeout_s)
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    finally:
        # torch's hook would say the rank of this round for ever, and one more with each round.
        sys.excepthook = hook
    return transport
