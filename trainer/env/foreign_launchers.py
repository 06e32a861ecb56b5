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

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping

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


# A short text such as a[0-99999]b[0-99999] names billions of nodes, so this limit protects the memory.
_MAX_NUM_NODES = 1 << 20
# A name consists of text and ranges in brackets. A comma outside brackets separates two names.
_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
# A part of a name: the text inside brackets (group 1), or other text (group 2).
_NAME_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# A number of tasks, and the number of consecutive nodes that have as many, as in 4(x2).
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


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


def expand_node_list(text: str) -> list[str]:
    """Return the names in a list such as `node[01-03,07],login`, in the order of the list.

    Raises:
        ValueError: `text` is not a list of this form, or names too many nodes.
    """
    names = []
    position = 0
    for match in _NAME.finditer(text):
        # One comma separates two names. Any other text between them ends the loop, and is an error below.
        separator = "" if position == 0 else ","
        if text[position : match.start()] != separator:
            break
        position = match.end()
        # The names are all combinations of the choices of each part: a part without brackets has one choice.
        choices = [list(_expand_part(part, text)) for part in _NAME_PART.finditer(match[0])]
        names += ["".join(parts) for parts in itertools.islice(itertools.product(*choices), _MAX_NUM_NODES + 1)]
        if len(names) > _MAX_NUM_NODES:
            raise ValueError(f"{text!r} names more than {_MAX_NUM_NODES} nodes")
    if position != len(text) or not names:
        raise ValueError(f"{text!r} is not a list of nodes such as node[01-03,07],login")
    return names


def expand_task_counts(text: str, num_nodes: int) -> list[int]:
    """Return the number of tasks on each node, from a list such as `4(x2),3`, or from `4` for all nodes.

    Raises:
        ValueError: `text` is not a list of this form, or is for another number of nodes.
    """
    counts = _list_counts(text)
    if len(counts) == 1:
        return counts * num_nodes
    if len(counts) != num_nodes:
        raise ValueError(f"{text!r} has the tasks of {len(counts)} nodes, but the allocation has {num_nodes}")
    return counts


def _list_counts(text: str) -> list[int]:
    """Return the numbers in a list of tasks per node; `4(x2)` gives 4 twice. For errors, see `expand_task_counts`."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks per node such as 4(x2),3")
        repeat = int(match[2] or 1)
        if len(counts) + repeat > _MAX_NUM_NODES:
            raise ValueError(f"{text!r} names more than {_MAX_NUM_NODES} nodes")
        counts += [int(match[1])] * repeat
    return counts


def read_nodes(environ: Mapping[str, str]) -> list[tuple[str, int]] | None:
    """Return the nodes of the Slurm allocation, with the number of tasks on each; None without an allocation.

    `SLURM_TASKS_PER_NODE` takes precedence over `SLURM_NTASKS_PER_NODE`, which is the same number for all nodes. But
    inside a step, the former may cover only the nodes of the step; then the latter is used, if it is set. If neither
    is set, each node has one task.

    Raises:
        ValueError: the variables contradict each other.
    """
    names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not names or "SLURM_JOB_ID" not in environ:
        return None
    nodes = expand_node_list(names)
    uniform_count = environ.get("SLURM_NTASKS_PER_NODE")
    tasks = environ.get("SLURM_TASKS_PER_NODE") or uniform_count or "1"
    if uniform_count and len(_list_counts(tasks)) != len(nodes):
        tasks = uniform_count
    return list(zip(nodes, expand_task_counts(tasks, len(nodes)), strict=True))


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process."""
    # A batch script has SLURM_PROCID too, but is not a task of `srun`.
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    return "SLURM_PROCID" in environ and (in_step or environ.get("ENVIRONMENT") != "BATCH")


def _expand_part(part: re.Match[str], text: str) -> Iterator[str]:
    """Yield the texts that a match of `_NAME_PART` stands for; `text` is the whole list, for error messages."""
    if part[2] is not None:
        yield part[2]
        return
    for range_text in part[1].split(","):
        match = _RANGE.fullmatch(range_text)
        if match is None:
            raise ValueError(f"{text!r} is not a list of nodes: {range_text!r} is not a range such as 01-04")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > _MAX_NUM_NODES:
            raise ValueError(f"{text!r} is not a list of nodes: the range {range_text!r} is empty or too large")
        # Numbers keep the width of the first one: 01-03 is 01, 02, 03.
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))
