"""`datasvc.trainer.run`: starts a job whose ranks call a function, and returns the results in rank order.

The launcher, in this process, starts the ranks. A server, also here, sends them the call: the pickled function with
its arguments. Each rank sends back an answer, which has its result or its exception.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.function.call_server import CallServer
from datasvc.trainer.function.pickling import pickle_call, unpickle_error, unpickle_result
from datasvc.trainer.function.worker import KEY, PORT
from datasvc.trainer.launch.command_line import run_job
from datasvc.trainer.launch.ranks.hosts import is_local, parse_hosts, read_host_file
from datasvc.trainer.launch.ranks.job import ElasticOptions, Host, JobFailure, LaunchJob, RemoteSettings

T = TypeVar("T")

# The program of each rank. It gets the search path of this process, to import the same modules and this package.
_PROGRAM = "import sys; sys.path[:] = {paths!r}; from datasvc.trainer.function.worker import main; main()"


def run(
    func: Callable[..., Any],  # calls `hvd.init()` first if it communicates with the other ranks
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,  # number of ranks, by default 1
    min_num_proc: int | None = None,  # this, `max_num_proc` or `host_discovery_script` makes the job elastic
    max_num_proc: int | None = None,
    slots: int | None = None,  # slots (ranks) of each host whose number of slots is not given
    reset_limit: int | None = None,  # changes of the ranks after which an elastic job ends
    cooldown_range: tuple[float, float] | None = None,  # minimum and maximum seconds without ranks of a failed host
    hosts: str | None = None,  # "a:2,b:2"; by default this machine
    hostfile: str | os.PathLike[str] | None = None,  # has lines "a slots=2"
    host_discovery_script: str | None = None,  # prints the hosts
    start_timeout: float | None = None,  # seconds in which all ranks must start; elastic jobs continue without others
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,  # noqa: ARG001 - Horovod's argument; this launcher has no checks to cache
    output_filename: str | os.PathLike[str] | None = None,  # folder for `rank.N/stdout` and `rank.N/stderr`
    verbose: bool | int | None = False,  # whether to print the host and the command of each rank
    use_gloo: bool | None = None,  # ignored, because Gloo is always used
    use_mpi: bool | None = None,  # ignored with a warning, like `mpi_args`, because there is no MPI
    mpi_args: str | None = None,
    network_interface: str | None = None,  # older name of `network_interfaces`
    network_interfaces: Sequence[str] | str | None = None,  # those that connect the hosts: a list, or "eth0,eth1"
    executable: str | os.PathLike[str] | None = None,  # Python of the ranks, of the same version and packages
    np: int | None = None,  # older names of `num_proc`, `min_num_proc` and `max_num_proc`
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,  # environment of the ranks; None: that of this process
) -> list[Any]:
    """Run `func(*args, **kwargs)` as a data-parallel job of one process per rank; return the results in rank order.

    cloudpickle sends the function, so those of scripts, notebooks and closures work. Output is printed as by
    `datasvc.trainer.launch`. Ctrl-C is forwarded only if the main thread calls `run`. The results of an elastic job
    are those of the ranks that reached the end.

    Raises:
        HorovodInternalError: a rank ended without a result: it was killed, became unreachable, or left the process.
            An elastic job fails only if no rank has a result, or a rank called `sys.exit(0)`.
        TypeError: the function, an argument, or a result cannot be pickled.
        ValueError: the arguments contradict each other, or are out of range.
        Exception: that of the first rank that failed; its `__cause__` has the traceback of the rank.
    """
    _check_controller(use_gloo=use_gloo, use_mpi=use_mpi, mpi_args=mpi_args)
    num_proc = _merge_aliases("np", np, "num_proc", num_proc)
    min_num_proc = _merge_aliases("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _merge_aliases("max_np", max_np, "max_num_proc", max_num_proc)
    interfaces = _merge_aliases("network_interface", network_interface, "network_interfaces", network_interfaces)
    _check_start_timeout(start_timeout)
    _check_counts(num_proc=num_proc, min_num_proc=min_num_proc, max_num_proc=max_num_proc, slots=slots)
    job = LaunchJob(
        command=[str(executable or sys.executable)],  # of Python; `_run` adds the program
        num_ranks=num_proc or min_num_proc or 1,
        hosts=_read_hosts(hosts, hostfile, slots or 1),
        remote=_remote_settings(ssh_port, ssh_identity_file, interfaces),
        start_timeout_s=start_timeout,
        output_folder=None if output_filename is None else Path(output_filename),
        is_verbose=bool(verbose),
    )
    elastic = _choose_elastic(
        job, min_num_proc, max_num_proc, host_discovery_script, slots, reset_limit, cooldown_range
    )
    call = pickle_call(func, tuple(args), dict(kwargs or {}))
    return _run(job, elastic, dict(os.environ if env is None else env), call)


def _check_start_timeout(start_timeout: float | None) -> None:
    if start_timeout is not None and not start_timeout > 0:
        raise ValueError(f"start_timeout is {start_timeout!r}; expected seconds above 0, or None for no limit")


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        # Compared with None, because 0 does not mean the default.
        if count is not None and (not isinstance(count, numbers.Integral) or count < 1):
            raise ValueError(f"{name} is {count!r}; expected a whole number of at least 1, or None for the default")


def _remote_settings(
    ssh_port: int | None, identity_file: str | os.PathLike[str] | None, interfaces: Sequence[str] | str | None
) -> RemoteSettings:
    return RemoteSettings(
        ssh_port=ssh_port,
        ssh_identity_file=None if identity_file is None else Path(identity_file),
        network_interfaces=tuple(interfaces.split(",") if isinstance(interfaces, str) else interfaces or ()),
    )


def _choose_elastic(
    job: LaunchJob,
    min_num_proc: int | None,
    max_num_proc: int | None,
    script: str | None,
    slots: int | None,
    reset_limit: int | None,
    cooldown_range: tuple[float, float] | None,
) -> ElasticOptions | None:
    """Return the elastic options of a job; None if it is not elastic: `ValueError` if it has such options then."""
    if not all(value is None for value in (min_num_proc, max_num_proc, script)):
        return ElasticOptions(
            min_num_ranks=min_num_proc or job.num_ranks,
            max_num_ranks=max_num_proc,
            discovery_script=script,
            slots_per_host=slots,
            reset_limit=reset_limit,
            cooldown_range_s=cooldown_range,
        )
    if not (reset_limit is None and cooldown_range is None):
        name = "cooldown_range" if reset_limit is None else "reset_limit"
        raise ValueError(
            f"{name} is for elastic jobs: give min_num_proc, max_num_proc or host_discovery_script as well"
        )
    return None


def _run(job: LaunchJob, elastic: ElasticOptions | None, environ: Mapping[str, str], call: bytes) -> list[Any]:
    """Run a job whose ranks make the pickled call in the Python of its command; for results and errors, see `run`."""
    # Only processes that have the key can fetch the call. The ranks get the key in their environment.
    key = secrets.token_bytes(32)
    # A discovery script may return any host, so the server then accepts connections from other hosts.
    has_discovery = elastic is not None and elastic.discovery_script is not None
    for_other_hosts = has_discovery or not all(is_local(host.name, environ) for host in job.hosts)
    server = CallServer(call, key=key, for_other_hosts=for_other_hosts)
    job = dataclasses.replace(
        job,
        command=[*job.command, "-c", _PROGRAM.format(paths=[str(Path(path).absolute()) for path in sys.path])],
        prefixes_lines=job.num_ranks > 1,
        variables={**job.variables, PORT: str(server.port), KEY: key.hex()},
    )
    with server.open():
        try:
            failure = run_job(job, elastic, environ)
        except OSError as error:
            raise HorovodInternalError(f"cannot start the ranks: {error}") from error
    if failure is not None:
        raise _choose_error(failure, server) if elastic is None else _choose_elastic_error(failure, server)
    # The launcher counts status 0 as success, even if the function did not return but called sys.exit(0).
    exited_ranks = sorted(answer.rank for answer in server.errors if answer.has_left)
    results = server.results
    missing_ranks = sorted(set(range(job.num_ranks)) - {answer.rank for answer in results})
    # An elastic job may end with fewer ranks than it started with, but not without any result.
    is_incomplete = bool(missing_ranks) and (elastic is None or not results)
    if exited_ranks or is_incomplete:
        first_rank = [*exited_ranks, *missing_ranks][0]
        raise HorovodInternalError(f"rank {first_rank} ended with status 0 before the function returned")
    return [unpickle_result(answer) for answer in results]


def _choose_error(failure: JobFailure, server: CallServer) -> BaseException:
    """Return the exception that caused the failure of a job that is not elastic."""
    errors = [unpickle_error(answer) for answer in server.errors]
    reporting_ranks = {answer.rank for answer in server.errors}
    is_cause_unreported = failure.rank is not None and failure.rank not in reporting_ranks
    # A rank usually raises HorovodInternalError because it lost another rank, so any other exception is the cause.
    causes = [error for error in errors if not isinstance(error, HorovodInternalError)]
    if causes:
        return causes[0]
    if errors and not is_cause_unreported:
        return errors[0]
    # The rank that failed first has sent no exception, for example because it was killed.
    return HorovodInternalError(failure.describe())


def _merge_aliases(older: str, older_value: T | None, newer: str, value: T | None) -> T | None:
    """Return the value of an argument that has two names. Raise ValueError if the names have different values."""
    if older_value is not None and value is not None and older_value != value:
        raise ValueError(f"{older}={older_value!r} is the older name of {newer}={value!r}: give one of them")
    return older_value if value is None else value


def _check_controller(*, use_gloo: bool | None, use_mpi: bool | None, mpi_args: str | None) -> None:
    """Check the arguments that choose between Gloo and MPI in Horovod. Only Gloo exists here, so warn of MPI."""
    if use_gloo and use_mpi:
        raise ValueError("use_gloo=True and use_mpi=True contradict each other: give one; both use gloo here")
    if use_mpi or mpi_args:
        argument = "use_mpi=True" if use_mpi else f"mpi_args={mpi_args!r}"
        warnings.warn(
            f"{argument} has no effect: there is no MPI; the ranks communicate over gloo, and over NCCL on GPUs",
            stacklevel=3,  # the warning names the line that calls `run`
        )


def _choose_elastic_error(failure: JobFailure, server: CallServer) -> BaseException:
    """Return the exception of the worker (a process of an elastic job) whose failure ended the job."""
    # The exceptions of other workers are not the cause: the job continued after them.
    errors = [answer for answer in server.errors if answer.worker is not None and answer.worker == failure.worker]
    return unpickle_error(errors[-1]) if errors else HorovodInternalError(failure.describe())


def _read_hosts(hosts: str | None, hostfile: str | os.PathLike[str] | None, slots: int) -> tuple[Host, ...]:
    if hosts is not None and hostfile is not None:
        raise ValueError("give hosts or hostfile, not both")
    if hosts is not None:
        return parse_hosts(hosts, default_slots=slots)
    if hostfile is not None:
        return read_host_file(Path(hostfile), default_slots=slots)
    return ()
