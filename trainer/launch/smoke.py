"""The smoke run of a job: its command as a few ranks on the first host, for a few steps, before all ranks start.

It finds a wrong option, a missing file, an import error, or a model that does not fit into memory.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from datasvc.printable import count_text
from datasvc.trainer.env.environment import SMOKE_RANKS, SMOKE_STEPS
from datasvc.trainer.launch.ranks.job import Host, JobFailure, LaunchJob
from datasvc.trainer.launch.ranks.rank_output import print_message
from datasvc.trainer.launch.ranks.static_job import run_static_job

NUM_STEPS: Final = 2  # the second one is the first with the state of the optimizer
# Files that the engine of rank 0 would write, and the whole job writes again. Empty: no file.
_FILES_OF_ENGINE: Final = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE_LOG")


def plan_smoke(job: LaunchJob) -> LaunchJob:
    """Return the smoke run of a job: `job.smoke_ranks` ranks on its first host, which write no files of the job.

    Raises:
        ValueError: the job, or its first host, has fewer ranks.
    """
    num_ranks = job.smoke_ranks
    assert num_ranks is not None
    if num_ranks > job.num_ranks:
        raise ValueError(f"--smoke {num_ranks} is more than the {job.num_ranks} ranks of the job")
    if job.hosts and num_ranks > job.hosts[0].num_slots:
        raise ValueError(
            f"--smoke {num_ranks} is more than the {job.hosts[0].num_slots} slots of {job.hosts[0].name}"
        )
    steps = {SMOKE_STEPS: str(NUM_STEPS), SMOKE_RANKS: str(job.num_ranks)}
    return replace(
        job,
        num_ranks=num_ranks,
        hosts=tuple(Host(host.name, num_ranks) for host in job.hosts[:1]),
        variables={**job.variables, **dict.fromkeys(_FILES_OF_ENGINE, ""), **steps},
        output_folder=None,
        time_limit_s=job.smoke_timeout_s,
        smoke_ranks=None,
    )


def run_smoke(job: LaunchJob, environ: Mapping[str, str]) -> JobFailure | None:
    """Run the smoke run of a job to its end; return its failure, and None if it has passed.

    Raises:
        StartError, OSError, ValueError: see `run_static_job`.
    """
    smoke, signals = plan_smoke(job), list[int]()
    place = f" on {smoke.hosts[0].name}" if smoke.hosts else ""
    print_message(f"smoke run: {NUM_STEPS} steps of {count_text(smoke.num_ranks, 'rank')}{place}")
    failure = run_static_job(smoke, environ, on_signal=signals.append)
    if failure is None and signals:
        # The program ended well in spite of the signal, which is meant for the whole job too.
        failure = JobFailure(exit_status=128 + signals[0], text=f"ended by {signal.Signals(signals[0]).name}")
    if failure is not None:
        return replace(failure, text=f"the smoke run has failed, and the job was not started: {failure.text}")
    print_message(f"the smoke run has passed; the job starts with {count_text(job.num_ranks, 'rank')}")
    return None
