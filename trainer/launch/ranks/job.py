"""What to run: a job of ranks, the hosts it runs on, and how an elastic one may change. Values only."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it takes."""

    name: str
    num_slots: int = 1


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """How commands are started on other hosts.

    Args:
        shell: `ssh`, or `srun` inside a Slurm allocation.
        ssh_port: None for what ssh's own configuration says.
        ssh_identity_file: a private key, None likewise.
        python: the interpreter that runs the guard of a remote rank; None for the path of this one.
        network_interfaces: names of interfaces by which other hosts reach this one; empty to find out.
    """

    shell: str = "ssh"
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None
    python: str | None = None
    network_interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """What to run.

    Args:
        command: the program and its arguments, started once per rank.
        num_ranks: how many; the start of an elastic job.
        hosts: where, in rank order; empty for all ranks on this machine.
        variables: set for every rank, on top of the launcher's environment.
        passed_names: environment variables that ranks on other hosts get too, beside the usual ones.
        grace_s: seconds between SIGTERM and SIGKILL when the others are ended.
        start_timeout_s: a rank that has not come by then ends the job; None to wait, and say so.
        prefixes_lines: whether lines of output begin with `[rank]`.
        stamps_lines: whether the time when a line came is put before that.
        output_folder: also write `rank.N/stdout` and `rank.N/stderr` there; None for no files.
        is_verbose: whether to say on standard error what is started where.
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


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """How the number of ranks may change while the job runs.

    Args:
        min_num_ranks: the job waits while there are fewer.
        max_num_ranks: slots beyond are left empty; None for no limit.
        discovery_script: prints `host` or `host:slots` lines; None to keep to the hosts of the job.
        slots_per_host: for lines without slots; None if every line must have them.
        elastic_timeout_s: how long to wait for slots; None for `HOROVOD_ELASTIC_TIMEOUT` or its default.
        reset_limit: how often ranks may come and go before the job ends with status 3; None for no limit.
        cooldown_range_s: least and greatest time for which a host that failed gets no ranks; None for ever.
    """

    min_num_ranks: int = 1
    max_num_ranks: int | None = None
    discovery_script: str | None = None
    slots_per_host: int | None = None
    elastic_timeout_s: float | None = None
    reset_limit: int | None = None
    cooldown_range_s: tuple[float, float] | None = None


class JobFailure(Protocol):
    """Why a job did not end well."""

    @property
    def rank(self) -> int | None:
        """The rank that failed first, if it was one."""

    @property
    def worker(self) -> str | None:
        """The name of its process, if the job was elastic."""

    @property
    def exit_status(self) -> int:
        """What the launcher exits with."""

    def describe(self) -> str:
        """For people, on standard error."""


@dataclass(frozen=True)
class RankFailure:
    """The first rank that did not end with status 0.

    `returncode` is negative for a signal. `reason` replaces the words that follow from it.
    """

    rank: int
    returncode: int
    last_lines: tuple[str, ...]
    host: str | None = None
    reason: str | None = None
    worker: None = None

    @property
    def exit_status(self) -> int:
        """What a shell would report."""
        return self.returncode if self.returncode > 0 else 128 - self.returncode

    def describe(self) -> str:
        """Which rank, where if there is more than one host, how, and the end of its output."""
        where = f" on {self.host}" if self.host is not None else ""
        text = f"rank {self.rank}{where} was the first to fail: it {self.reason or describe_end(self.returncode)}"
        return "\n".join([text, *(f"  [{self.rank}] {line}" for line in self.last_lines)])


def describe_end(returncode: int) -> str:
    """How a process ended, in words that follow its name."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
