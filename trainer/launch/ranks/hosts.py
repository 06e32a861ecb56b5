"""The hosts of a job and their slots, and the command and the variables for a rank on another host.

A slot is the place of one rank. `default_slots` is the number for hosts whose slots are not given. The slots of
repeated hosts add up, and hosts keep the order in which they first appear.
"""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import starmap
from pathlib import Path

from datasvc.trainer.env.environment import WORLD_VARIABLES
from datasvc.trainer.env.foreign_launchers import read_nodes
from datasvc.trainer.launch.ranks.job import Host, RemoteSettings
from datasvc.trainer.launch.ranks.rank_group import BOOTSTRAP

# A name that begins with "-" would be an option of ssh.
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_][\w.@-]*)(?::(?P<slots>\d+))?", re.ASCII)
_SLOTS = re.compile(r"(?:max[-_])?slots=(\d+)")


_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# Variables that every rank on another host gets from the launcher: prefixes of names, and whole names.
_PASSED_PREFIXES = (
    "PYTHON",
    "HOROVOD_",
    "HVD_",
    "DATASVC_",
    "TRAINER_",
    "TORCH",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "AWS_",
    "LC_",
)
_PASSED_NAMES = frozenset(
    {
        "PATH",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LANG",
        "TMPDIR",
        "TZ",
        *WORLD_VARIABLES,
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)


def parse_hosts(text: str, *, default_slots: int = 1) -> tuple[Host, ...]:
    """Parse hosts such as `a:2,b:2`, or `[fe80::1]:2` for an address with colons.

    Raises:
        ValueError: a part is not a host.
    """
    return _merge_repeated(_parse_host(part.strip(), default_slots) for part in text.split(","))


def parse_host_file(text: str, *, default_slots: int = 1) -> tuple[Host, ...]:
    """Parse a host file in the format of Open MPI: lines `a slots=2`, `a:2` or `a`; `#` begins a comment.

    Raises:
        ValueError: a line is not a host, or there are no hosts.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        tokens = line.partition("#")[0].split()
        if not tokens:
            continue
        try:
            hosts.append(_parse_line(tokens, default_slots))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not hosts:
        raise ValueError("it contains no hosts")
    return _merge_repeated(hosts)


def read_host_file(path: Path, *, default_slots: int = 1) -> tuple[Host, ...]:
    """Read a host file; see `parse_host_file`.

    Raises:
        ValueError: the file cannot be read, or is not a host file; the message has its path.
    """
    try:
        return parse_host_file(path.read_text(encoding="utf-8"), default_slots=default_slots)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot use the host file {path}: {error}") from None


def read_allocation(environ: Mapping[str, str], *, slots_per_host: int | None = None) -> tuple[Host, ...]:
    """Return the hosts of the Slurm allocation that the launcher runs in; an empty tuple outside an allocation.

    Args:
        environ: environment of the launcher.
        slots_per_host: number of slots of each host; None for the number of its tasks in the allocation.

    Raises:
        ValueError: Slurm's variables contradict each other, or srun has started several launchers.
    """
    nodes = read_nodes(environ)
    if nodes is None:
        return ()
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ValueError(
            f"srun has started {environ['SLURM_STEP_NUM_TASKS']} launchers; start the program itself with srun, "
            "or one launcher without srun, which starts the ranks"
        )
    return tuple(Host(name, slots_per_host or num_tasks) for name, num_tasks in nodes)


def _parse_host(text: str, default_slots: int) -> Host:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a host such as node1 or node1:2")
    # The brackets only separate an address with colons from its slots.
    return _make_host(match["name"].strip("[]"), int(match["slots"] or default_slots))


def _parse_line(tokens: list[str], default_slots: int) -> Host:
    host = _parse_host(tokens[0], default_slots)
    num_slots = host.num_slots
    for token in tokens[1:]:
        match = _SLOTS.fullmatch(token)
        if match is None:
            raise ValueError(f"{token!r} is not of the form slots=N")
        # Ignore max_slots: it is for ranks beyond the slots, which only Open MPI starts.
        if token.startswith("slots"):
            num_slots = int(match[1])
    return _make_host(host.name, num_slots)


def _make_host(name: str, num_slots: int) -> Host:
    """Return a host. Raises ValueError: it has no slots."""
    if num_slots < 1:
        raise ValueError(f"host {name} has no slots; leave it out")
    return Host(name, num_slots)


def _merge_repeated(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return each host once, with the sum of its slots."""
    num_slots: Counter[str] = Counter()
    for host in hosts:
        num_slots[host.name] += host.num_slots
    return tuple(starmap(Host, num_slots.items()))


def is_local(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether `name` is a host name of this machine, so that its ranks start without a remote shell.

    `environ` is the environment of the launcher. If it is given, this node's name in Slurm counts too.
    """
    hostname = socket.gethostname()
    names = _LOCAL_NAMES | {hostname, hostname.partition(".")[0]}
    return name in names or name == (environ or {}).get("SLURMD_NODENAME")


def plan_remote_command(host: str, settings: RemoteSettings) -> list[str]:
    """Return the command that runs a guard on `host`. The command's standard streams are connected to the guard's."""
    # -I -S: the guard needs the standard library only, so no site package can change or delay its start.
    bootstrap = [settings.python or sys.executable, "-I", "-S", "-c", BOOTSTRAP]
    if settings.shell == "srun":
        # Start one task. With --overlap it shares the node with other tasks of the job, and does not wait for them.
        one_task = ["--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
        task_options = ["--cpu-bind=none", "--mem=0", "--mpi=none", "--export=ALL", "--quiet"]
        return ["srun", *one_task, *task_options, *bootstrap]
    # ssh must fail rather than hang: it prompts for no password, and ends if the host does not answer for a minute.
    options = ["BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=15", "ServerAliveCountMax=4"]
    command = ["ssh", *(argument for option in options for argument in ("-o", option))]
    # No terminal, agent, X11 or escape characters: only the three streams are forwarded.
    command += ["-T", "-a", "-x", "-e", "none"]
    if settings.ssh_port is not None:
        command += ["-p", str(settings.ssh_port)]
    if settings.ssh_identity_file is not None:
        command += ["-i", str(settings.ssh_identity_file)]
    return [*command, "--", host, "exec " + shlex.join(bootstrap)]


def choose_passed(environ: Mapping[str, str], names: Iterable[str] = ()) -> dict[str, str]:
    """Return the launcher's variables that a rank on another host gets: a fixed selection, and `names`."""
    chosen = _PASSED_NAMES | set(names)
    return {name: value for name, value in environ.items() if name in chosen or name.startswith(_PASSED_PREFIXES)}
