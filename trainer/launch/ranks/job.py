"""The description of a job (command, ranks, hosts, elastic options) and of its failure. No I/O."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """A machine and its number of slots; a slot is the place of one rank."""

    name: str
    num_slots: int = 1


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """Settings for the start of commands on other hosts.

    Attributes:
        shell: remote shell: `ssh`, or `srun` inside a Slurm allocation.
        ssh_port, ssh_identity_file: port of the ssh server, and private key; None for the configuration of ssh.
        python: interpreter that runs the guard of a remote rank; None for the path of this interpreter.
        network_interfaces: names of the interfaces that connect the hosts; empty to detect them.
    """

    shell: str = "ssh"
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None
    python: str | None = None
    network_interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A job of the launcher.

    Attributes:
        command: program and arguments, started once per rank.
        num_ranks: number of ranks; for an elastic job, at the start.
        hosts: hosts in rank order; empty for all ranks on this machine.
        variables: environment variables for every rank, in addition to the launcher's environment.
        passed_names: variables of the launcher that are copied to ranks on other hosts, beside the usual ones.
        grace_s: seconds between SIGTERM and SIGKILL when ranks are terminated.
        start_timeout_s: time in which every rank must start; also the time, after the first call of `init`, in which
            every rank must call it. A late rank ends the job, unless the job is elastic. None: no limit, but a note.
        prefixes_lines, stamps_lines: whether lines of output begin with `[rank]`, and with the time.
        output_folder: folder for copies of the output, `rank.N/stdout` and `rank.N/stderr`; None for no files.
        is_verbose: whether to print the host and the command of each rank on standard error.
        time_limit_s: time after which the job is ended as failed; for static jobs. None: no limit.
        smoke_ranks: number of ranks of the smoke run before the job; None: there is none.
        smoke_timeout_s: time limit of the smoke run; None: no limit.
        num_servers: number of first ranks that are parameter servers; 0: none. The job goes on without other ranks
            that fail, as long as one of them is left.
    """

    command: Sequence[str]
    num_ranks: int
    hosts: tuple[Host, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    passed_names: tuple[str, ...] = ()
    remote: RemoteSettings = RemoteSettings()
    grace_s: float = 5.0
    start_timeout_s: float | None = None
    prefixes_lines: bool = True
    stamps_lines: bool = False
    output_folder: Path | None = None
    is_verbose: bool = False
    time_limit_s: float | None = None
    smoke_ranks: int | None = None
    smoke_timeout_s: float | None = None
    num_servers: int = 0


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """Options of an elastic job.

    Attributes:
        min_num_ranks: minimum number of ranks; the job waits while there are fewer.
        max_num_ranks: maximum number of ranks; further slots stay empty. None for no limit.
        discovery_script: script that prints `host` or `host:slots` lines; None to use the hosts of the job.
        slots_per_host: number of slots of a host if the script prints only its name; None for 1.
        elastic_timeout_s: maximum time to wait for slots; None for `HOROVOD_ELASTIC_TIMEOUT` or its default.
        reset_limit: number of changes of the ranks after which the job ends with status 3; None for no limit.
        cooldown_range_s: see `Blacklist`.
    """

    min_num_ranks: int = 1
    max_num_ranks: int | None = None
    discovery_script: str | None = None
    slots_per_host: int | None = None
    elastic_timeout_s: float | None = None
    reset_limit: int | None = None
    cooldown_range_s: tuple[float, float] | None = None


_HOROVOD_HINT = (
    "the program imports horovod, which is not installed. To run it unchanged, install datasvc-horovod, which gives "
    "the trainer that name (a wheel of the release, or pip install ./tools/horovod_compat in a checkout); or write "
    "`import datasvc.trainer as hvd` in place of `import horovod.torch as hvd`"
)


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """The failure of a job.

    Attributes:
        exit_status: exit status of the launcher.
        text: description of the first failure, followed by those of other workers.
        rank, worker: rank, and in an elastic job name of the worker, that failed first; None for another cause.
        last_lines: last output lines of that rank or worker.
    """

    exit_status: int
    text: str
    rank: int | None = None
    worker: str | None = None
    last_lines: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a message for standard error: the failure, and the end of the output of the rank."""
        label = self.rank if self.worker is None else self.worker
        lines = [self.text, *(f"  [{label}] {line}" for line in self.last_lines)]
        if any("No module named 'horovod" in line for line in self.last_lines):
            lines.append(_HOROVOD_HINT)
        return "\n".join(lines)


def exit_status_of(returncode: int) -> int:
    """Return the exit status that a shell reports for the return code of a failed process; -N becomes 128 + N."""
    return returncode if returncode > 0 else 128 - returncode


def describe_end(returncode: int) -> str:
    """Describe the end of a process by a text that follows its name, such as "exited with status 1"."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
