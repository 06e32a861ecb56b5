"""Pure functions that translate the environment variables of srun and mpirun to those of torchrun.

The ranks need the address of torch's key-value store before they can communicate. srun and mpirun do not set it, so
each rank computes the same address:

- `MASTER_ADDR` is the loopback address if all ranks are on one node. Otherwise it is the first host in the node list
  of the Slurm step or job, because that host has rank 0.
- `MASTER_PORT` is between 20000 and 31999, a hash of the numbers of the job and the step. If two jobs on one node
  get the same port, set MASTER_PORT for one of them.

A variable that is set already, for example by `srun --export` or `mpirun -x`, keeps its value.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from datasvc.trainer.env.slurm import expand_node_list, expand_task_counts, is_task

# Linux gives ports from 32768 on to any process that asks for a free port, so these ports are below.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
# torchrun's names, and Open MPI's names of the same variables.
_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
# Variables with the number of the job; the first one that is set is used.
_JOB_NUMBERS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "PBS_JOBID", "JOB_ID", "LSB_JOBID")


def translate(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set; empty under torchrun, under our launcher, and without a launcher.

    Raises:
        ValueError: a variable is missing or malformed; the message names it.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return {}
    if "OMPI_COMM_WORLD_RANK" in environ:
        placement = {name: _required(environ, mpi_name, "mpirun") for name, mpi_name in _MPI.items()}
        return placement | _address(environ, placement)
    if is_task(environ):
        placement = _read_task(environ)
        return placement | _address(environ, placement)
    return {}


def _read_task(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for the placement of this task of srun."""
    # The variables of the step come first: a step may have fewer tasks and nodes than its job.
    size = environ.get("SLURM_STEP_NUM_TASKS") or _required(environ, "SLURM_NTASKS", "srun")
    node = parse_whole(environ.get("SLURM_NODEID", "0"), "SLURM_NODEID")
    num_nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if counts is None:
        # Without counts per node, all tasks are on the only node, or each node has the same number of tasks.
        local_size = size if num_nodes == "1" else _required(environ, "SLURM_NTASKS_PER_NODE", "srun")
    else:
        per_node = expand_task_counts(counts, parse_whole(num_nodes, "SLURM_NNODES"))
        if node >= len(per_node):
            raise ValueError(
                f"SLURM_NODEID is {node}, but SLURM_TASKS_PER_NODE ({counts}) counts {len(per_node)} nodes; "
                "correct one of them"
            )
        local_size = str(per_node[node])
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": _required(environ, "SLURM_LOCALID", "srun"),
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": num_nodes,
    }


def _address(environ: Mapping[str, str], placement: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT; {} for one rank, which needs no store."""
    if placement["WORLD_SIZE"] == "1":
        return {}
    address = environ.get("MASTER_ADDR") or _first_host(environ, placement)
    port = environ.get("MASTER_PORT") or _derive_port(environ)
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


def _first_host(environ: Mapping[str, str], placement: Mapping[str, str]) -> str:
    """Return the name or the address of the host of rank 0."""
    if placement["LOCAL_WORLD_SIZE"] == placement["WORLD_SIZE"]:
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return expand_node_list(environ[name])[0]
    raise ValueError("the host of rank 0 is unknown: set MASTER_ADDR, as in mpirun -x MASTER_ADDR=host")


def _derive_port(environ: Mapping[str, str]) -> str:
    """Return a port that is the same for all ranks of this job and step."""
    for name in _JOB_NUMBERS:
        if environ.get(name):
            job = f"{environ[name]}.{environ.get('SLURM_STEP_ID', '')}"
            return str(_FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS)
    raise ValueError("the environment has no job number: set MASTER_PORT to a free port, the same for all ranks")


def _required(environ: Mapping[str, str], name: str, launcher: str) -> str:
    if name not in environ:
        raise ValueError(f"the environment has variables of {launcher}, but lacks {name}; set it")
    return environ[name]


def parse_whole(text: str, name: str) -> int:
    """Return the value of a variable as an integer.

    Raises:
        ValueError: `text` is not a whole number; the message has the `name` of the variable.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {text!r}") from None
