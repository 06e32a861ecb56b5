"""Builds the command that starts a rank on another host through a guard, and chooses the variables of the rank.

A guard (`remote_guard`) is a process that runs the rank, and terminates it if the launcher is lost.
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Iterable, Mapping

from datasvc.trainer.env.environment import WORLD_VARIABLES
from datasvc.trainer.launch.ranks.job import RemoteSettings
from datasvc.trainer.launch.ranks.remote_process import BOOTSTRAP

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
