"""Starts what this process does in a job with parameter servers: rank 0 coordinates, the next serve, others work.

To the rest of the training program each process is a job of one rank: it starts no collectives, so it does not wait
for a process that is lost. Rank 0 reports, evaluates and saves.
"""

from __future__ import annotations

import os
import signal
import sys

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.models.provenance.forgetting import ForgetPlan
from datasvc.models.saving.preemption import SIGNALS
from datasvc.trainer.env.environment import (
    NUM_SERVERS,
    RankPlacement,
    placement_variables,
    read_engine_settings,
    read_num_servers,
    read_placement,
)
from datasvc.trainer.recipes.reporting.events import choose_events
from datasvc.trainer.recipes.reporting.recorder import LoggedEvents
from datasvc.trainer.recipes.servers.coordinate import coordinate
from datasvc.trainer.recipes.servers.server_job import ServerJob, make_server_optimizer
from datasvc.trainer.recipes.servers.work import work
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train
from datasvc.trainer.servers.server_link import open_store
from datasvc.trainer.servers.shard_server import serve_shard


def train_any(config: TrainConfig, forget: ForgetPlan | None = None) -> str | None:
    """Train with or without parameter servers, as the settings say; see `train`.

    Returns:
        The last committed version; None in a process of servers or workers that saves nothing.

    Raises:
        ConfigError: the settings need servers, and the job has none, or the reverse. See `train` for others.
    """
    num_servers = read_num_servers(os.environ)
    if not config.uses_servers:
        if num_servers:
            raise ConfigError(
                f"the job has {num_servers} parameter servers, and sync is {config.sync!r}; give --sync ssp:3 or "
                "async, or leave out --servers of the launcher"
            )
        return train(config, forget)
    placement = read_placement(os.environ)
    if not 0 < num_servers < placement.size:
        raise ConfigError(
            f"sync is {config.sync!r}, which needs parameter servers: start the job with datasvc-run -np N --servers "
            f"M, M below N, or set {NUM_SERVERS} for all ranks with another launcher"
        )
    job = ServerJob(
        open_store(placement), placement, num_servers, timeout_s=read_engine_settings(os.environ).start_timeout_s
    )
    os.environ.update(placement_variables(RankPlacement()))
    hvd.init()
    events = LoggedEvents(choose_events(sys.stdout))
    rank = placement.rank
    role = "worker" if rank >= num_servers else "server"
    events.report("start", rank=rank, size=placement.size, pid=os.getpid(), role=role)
    if rank == 0:
        return coordinate(config, job, events)
    # Rank 0 saves after a signal, and needs the others until then. They end with it.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if role == "worker":
        work(config, job)
    else:
        serve_shard(
            job.store,
            server=rank,
            num_workers=job.num_workers,
            make_optimizer=make_server_optimizer(config),
            timeout_s=job.timeout_s,
            lost_after_s=config.lost_after,
        )
    hvd.shutdown()
    return None
