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
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,  # noqa: ARG001 - Horovod's argument; this launcher has no checks to cache
    output_filename: str | os.PathLike[str] | None = None,
    verbose: bool | int | None = False,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | str | None = None,
    executable: str | os.PathLike[str] | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `func(*args, **kwargs)` as a data-parallel job, with one process per rank.

    cloudpickle sends the function and its arguments, so functions of scripts, notebooks and closures work. The output
    of the ranks is printed as by `datasvc.trainer.launch`. Ctrl-C is forwarded only if the main thread calls `run`.

    Args:
        func: function that every rank calls; it calls `hvd.init()` first if it communicates with the other ranks.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        num_proc: number of ranks, by default 1.
        min_num_proc: minimum number of ranks; makes the job elastic.
        max_num_proc: maximum number of ranks; makes the job elastic.
        slots: number of slots (ranks) of each host whose number of slots is not given.
        reset_limit: number of changes of the ranks after which an elastic job ends.
        cooldown_range: minimum and maximum seconds for which a host gets no ranks after a failure.
        hosts: hosts of the form `a:2,b:2`; by default this machine.
        hostfile: path of a file with lines `a slots=2`.
        host_discovery_script: script that prints the hosts; makes the job elastic.
        start_timeout: seconds in which all ranks must start. Otherwise the job ends, but an elastic job continues
            without the ranks that have not started.
        ssh_port: port of the ssh servers of other hosts.
        ssh_identity_file: private key for other hosts.
        disable_cache: ignored.
        output_filename: folder for the files `rank.N/stdout` and `rank.N/stderr`.
        verbose: whether to print the host and the command of each rank.
        use_gloo: ignored, because gloo is always used.
        use_mpi: ignored with a warning, because there is no MPI.
        mpi_args: ignored with a warning.
        network_interface: older name of `network_interfaces`.
        network_interfaces: names of the interfaces that connect the hosts, as a list or a text with commas.
        executable: Python interpreter for the ranks; it needs the same version and packages as this one.
        np: older name of `num_proc`.
        min_np: older name of `min_num_proc`.
        max_np: older name of `max_num_proc`.
        env: environment of the ranks; None for that of this process.

    Returns:
        The results in rank order; for an elastic job, those of the ranks that reached the end.

    Raises:
        HorovodInternalError: a rank ended without a result: it was killed, became unreachable, or called `os._exit`
            or `sys.exit(0)`. An elastic job continues without such a rank. But it fails if no rank has a result, or
            a rank called `sys.exit(0)`.
        TypeError: the function, an argument, or a result cannot be pickled.
        ValueError: the arguments contradict each other, or are out of range.
        Exception: the exception of the function on the first rank that failed; its `__cause__` has the traceback of
            that rank.
    """
    _check_controller(use_gloo=use_gloo, use_mpi=use_mpi, mpi_args=mpi_args)
    num_proc = _merge_aliases("np", np, "num_proc", num_proc)
    min_num_proc = _merge_aliases("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _merge_aliases("max_np", max_np, "max_num_proc", max_num_proc)
    interfaces = _merge_aliases("network_interface", network_interface, "network_interfaces", network_interfaces)
    counts = {"num_proc": num_proc, "min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "slots": slots}
    for name, count in counts.items():
        # Compared with None, because 0 does not mean the default.
        if count is not None and (not isinstance(count, numbers.Integral) or count < 1):
            raise ValueError(f"{name} is {count!r}; expected a whole number of at least 1, or None for the default")
    if start_timeout is not None and not start_timeout > 0:
        raise ValueError(f"start_timeout is {start_timeout!r}; expected seconds above 0, or None for no limit")
    num_ranks = num_proc or min_num_proc or 1
    call = pickle_call(func, tuple(args), dict(kwargs or {}))
    environ = dict(os.environ if env is None else env)
    program = _PROGRAM.format(paths=[str(Path(path).absolute()) for path in sys.path])
    job = LaunchJob(
        command=[str(executable or sys.executable), "-c", program],
        num_ranks=num_ranks,
        hosts=_read_hosts(hosts, hostfile, slots or 1),
        remote=RemoteSettings(
            ssh_port=ssh_port,
            ssh_identity_file=None if ssh_identity_file is None else Path(ssh_identity_file),
            network_interfaces=tuple(interfaces.split(",") if isinstance(interfaces, str) else interfaces or ()),
        ),
        start_timeout_s=start_timeout,
        prefixes_lines=num_ranks > 1,
        output_folder=None if output_filename is None else Path(output_filename),
        is_verbose=bool(verbose),
    )
    elastic = None
    if not all(value is None for value in (min_num_proc, max_num_proc, host_discovery_script)):
        elastic = ElasticOptions(
            min_num_ranks=min_num_proc or num_ranks,
            max_num_ranks=max_num_proc,
            discovery_script=host_discovery_script,
            slots_per_host=slots,
            reset_limit=reset_limit,
            cooldown_range_s=cooldown_range,
        )
    elif not (reset_limit is None and cooldown_range is None):
        name = "cooldown_range" if reset_limit is None else "reset_limit"
        raise ValueError(
            f"{name} is for elastic jobs: give min_num_proc, max_num_proc or host_discovery_script as well"
        )
    return _run(job, elastic, environ, call)


def _run(job: LaunchJob, elastic: ElasticOptions | None, environ: Mapping[str, str], call: bytes) -> list[Any]:
    """Run a job whose ranks make the pickled call; for results and errors, see `run`."""
    # Only processes that have the key can fetch the call. The ranks get the key in their environment.
    key = secrets.token_bytes(32)
    # A discovery script may return any host, so the server then accepts connections from other hosts.
    has_discovery = elastic is not None and elastic.discovery_script is not None
    for_other_hosts = has_discovery or not all(is_local(host.name, environ) for host in job.hosts)
    server = CallServer(call, key=key, for_other_hosts=for_other_hosts)
    job = dataclasses.replace(job, variables={**job.variables, PORT: str(server.port), KEY: key.hex()})
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
