"""Number of processors that this process may use, and number of processes that its launcher has started.

The first is the basis for numbers of threads and worker processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

# The number of processes as launchers give it: torchrun and datasvc-run, Horovod, Open MPI, MPICH.
_SIZE_VARIABLES: Final = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def count_processors() -> int:
    """Return the number of processors in this process's affinity mask, or of all processors without such a mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_launched(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the number of processes that a launcher has started with this one, and the variable that has it.

    Without a launcher: ("", 1).
    """
    name = next((name for name in _SIZE_VARIABLES if name in environ), None)
    # A batch script of Slurm has a SLURM_PROCID too, but only `srun` starts several processes.
    if name is None and "SLURM_PROCID" in environ:
        in_step = "SLURM_STEP_ID" in environ or environ.get("ENVIRONMENT") != "BATCH"
        names = ("SLURM_STEP_NUM_TASKS", *(["SLURM_NTASKS"] if in_step else []))
        name = next((name for name in names if name in environ), None)
    size = environ.get(name or "", "1")
    return (name, int(size)) if name is not None and size.isdecimal() else ("", 1)
