"""`datasvc.trainer.run`: calls a function on every rank of a job, and returns the results in rank order."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.function.pickling import pickle_call, unpickle_error, unpickle_result
from datasvc.trainer.function.post import CallServer
from datasvc.trainer.function.worker import KEY, PORT
from datasvc.trainer.launch.command_line import run_job
from datasvc.trainer.launch.ranks.hosts import parse_host_file, parse_hosts
from datasvc.trainer.launch.ranks.job import ElasticOptions, Host, JobFailure, LaunchJob, RemoteSettings
from datasvc.trainer.launch.ranks.remote_shell import is_local

T = TypeVar("T")

# The search path of this process, so that ranks find the same modules, this one to begin with.
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
    disable_cache: bool | None = None,  # noqa: ARG001 - Horovod's: there is no check whose result could be kept
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
    """Runs `func(*args, **kwargs)` as a data-parallel job, each rank in a process of its own.

    The function and its arguments are sent by cloudpickle where it is installed, so functions of a script, a notebook
    or a closure will do; else by pickle, for functions of modules. Output of the ranks is printed as by
    `datasvc.trainer.launch`. From a thread other than the main one, Ctrl-C is not passed on.

    Args:
        func: what every rank calls; it begins with `hvd.init()` if it wants to talk to the other ranks.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks, 1 by default.
        min_num_proc: the least number of ranks, which makes the job elastic.
        max_num_proc: the greatest number of ranks of an elastic job.
        slots: ranks per host where the hosts do not say.
        reset_limit: how often ranks of an elastic job may come and go.
        cooldown_range: least and greatest seconds for which a host that failed is not tried.
        hosts: as `a:2,b:2`; by default this machine.
        hostfile: a file of lines `a slots=2`.
        host_discovery_script: prints the hosts of an elastic job.
        start_timeout: seconds after which a rank that has not come ends the job, or is left out if it is elastic.
        ssh_port: of the other hosts.
        ssh_identity_file: a private key for them.
        disable_cache: means nothing here.
        output_filename: a folder for `rank.N/stdout` and `rank.N/stderr`.
        verbose: whether to say what is started where.
        use_gloo: is so anyway.
        use_mpi: warns that the ranks talk over gloo: there is no MPI.
        mpi_args: likewise.
        network_interface: the older name of `network_interfaces`.
        network_interfaces: by which other hosts reach this one: names, or one text with commas.
        executable: the Python that runs the ranks, of this one's version and with its packages.
        np: the older name of `num_proc`.
        min_np: the older name of `min_num_proc`.
        max_np: the older name of `max_num_proc`.
        env: the ranks' environment in place of this process's.

    Returns:
        What the function returned on each rank; of an elastic job, on the ranks that came to its end.

    Raises:
        HorovodInternalError: a rank ended without an answer: killed, out of reach, or left by `os._exit`. An
            elastic job goes on without it, but not without any answer, nor after a `sys.exit` with status 0.
        TypeError: the function, an argument, or a result cannot be pickled.
        ValueError: the arguments describe no job.
        Exception: what the function raised on the first rank that failed, caused by that rank's traceback.
    """
    _check_controller(use_gloo=use_gloo, use_mpi=use_mpi, mpi_args=mpi_args)
    num_proc = _choose_name("np", np, "num_proc", num_proc)
    min_num_proc = _choose_name("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _choose_name("max_np", max_np, "max_num_proc", max_num_proc)
    interfaces = _choose_name("network_interface", network_interface, "network_interfaces", network_interfaces)
    num_ranks = num_proc or min_num_proc or 1
    if num_ranks < 1:
        raise ValueError(f"there must be at least one rank, not {num_ranks}")
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
            network_interfaces=_split(interfaces),
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
    key = secrets.token_bytes(32)
    # Hosts that a script finds may be any.
    finds_hosts = elastic is not None and elastic.discovery_script is not None
    for_other_hosts = finds_hosts or not all(is_local(host.name, environ) for host in job.hosts)
    post = CallServer(call, key=key, for_other_hosts=for_other_hosts)
    job = dataclasses.replace(job, variables={**job.variables, PORT: str(post.port), KEY: key.hex()})
    with post.open():
        try:
            failure = run_job(job, elastic, environ)
        except OSError as error:
            raise HorovodInternalError(f"cannot start the ranks: {error}") from error
    if failure is not None:
        raise _choose_error(failure, post) if elastic is None else _choose_elastic_error(failure, post)
    # To the launcher such a rank has finished, so its job has no failure.
    left = sorted(answer.rank for answer in post.errors if answer.has_left)
    results = post.results
    missing = sorted(set(range(job.num_ranks)) - {answer.rank for answer in results})
    if left or (missing and (elastic is None or not results)):
        raise HorovodInternalError(f"rank {[*left, *missing][0]} ended with status 0 before the function returned")
    return [unpickle_result(answer) for answer in results]


def _choose_error(failure: JobFailure, post: CallServer) -> BaseException:
    """The exception of the first rank that raised one, unless it only says that another rank died."""
    errors = [unpickle_error(answer) for answer in post.errors]
    told = {answer.rank for answer in post.errors}
    has_died = failure.rank is not None and failure.rank not in told
    own = [error for error in errors if not isinstance(error, HorovodInternalError)]
    if own:
        return own[0]
    if errors and not has_died:
        return errors[0]
    return HorovodInternalError(failure.describe())


def _choose_name(older: str, older_value: T | None, newer: str, value: T | None) -> T | None:
    """The value of an argument that has two names."""
    if older_value is not None and value is not None and older_value != value:
        raise ValueError(f"{older}={older_value!r} is the older name of {newer}={value!r}: give one of them")
    return older_value if value is None else value


def _check_controller(*, use_gloo: bool | None, use_mpi: bool | None, mpi_args: str | None) -> None:
    if use_gloo and use_mpi:
        raise ValueError("use_gloo=True and use_mpi=True: give one of them; the ranks talk over gloo either way")
    if use_mpi or mpi_args:
        given = "use_mpi=True" if use_mpi else f"mpi_args={mpi_args!r}"
        warnings.warn(
            f"{given} has no effect: there is no MPI here, the ranks talk over gloo, and NCCL on GPUs", stacklevel=3
        )


def _choose_elastic_error(failure: JobFailure, post: CallServer) -> BaseException:
    """The exception of the worker that ended the job: the job has gone on from those of others."""
    own = [answer for answer in post.errors if answer.worker is not None and answer.worker == failure.worker]
    return unpickle_error(own[-1]) if own else HorovodInternalError(failure.describe())


def _read_hosts(hosts: str | None, hostfile: str | os.PathLike[str] | None, slots: int) -> tuple[Host, ...]:
    if hosts is not None and hostfile is not None:
        raise ValueError("give hosts or hostfile, not both")
    if hosts is not None:
        return parse_hosts(hosts, default_slots=slots)
    if hostfile is not None:
        try:
            return parse_host_file(Path(hostfile).read_text(encoding="utf-8"), default_slots=slots)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot use the host file {hostfile}: {error}") from None
    return ()


def _split(names: Sequence[str] | str | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return tuple(names.split(",")) if isinstance(names, str) else tuple(names)
