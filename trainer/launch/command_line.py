"""The launcher's command line: `datasvc-run -np 2 python train.py`, with horovodrun's flags.

Exit status: 0 if all ranks succeed; otherwise that of the first rank that failed, or 128 + N if signal N killed it.
The launcher's own errors: 2 for an invalid command line, 3 for an elastic job that has reached its reset limit, 127
for a program that does not exist, 126 for a program that cannot be started, 130 after Ctrl-C, 1 for any other failure
of the launcher.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from datasvc.extras import explain_missing
from datasvc.printable import escape_unencodable
from datasvc.trainer.env.environment import NUM_SERVERS, SMOKE_RANKS, SMOKE_STEPS
from datasvc.trainer.launch.config_file import OneLineParser, read_config_file
from datasvc.trainer.launch.engine_flags import CONTROLLERS, add_engine_flags, list_ignored, read_engine_flags
from datasvc.trainer.launch.ranks.hosts import is_local, parse_hosts, read_allocation, read_host_file
from datasvc.trainer.launch.ranks.job import ElasticOptions, Host, JobFailure, LaunchJob, RemoteSettings
from datasvc.trainer.launch.ranks.rank_output import print_message
from datasvc.trainer.launch.ranks.rank_process import StartError
from datasvc.trainer.launch.ranks.static_job import run_static_job
from datasvc.trainer.launch.smoke import plan_smoke, run_smoke

_TORCH_BUILDS = "https://pytorch.org/get-started/locally"
# Libraries for tensor operations that only Horovod can use.
_FOREIGN_OPERATIONS = ("MPI", "CCL", "DDL")
# The name of a feature in the table, whether this installation has it, and advice if it has not.
_Feature = tuple[str, bool, str]


def main(arguments: Sequence[str] | None = None, *, prog: str = "datasvc-run") -> int:
    """Parse the command line, run the job, report the first failure on standard error, and return the exit status.

    Args:
        arguments: command-line arguments; None for those of this process.
        prog: name of the program in usage messages.
    """
    escape_unencodable()
    try:
        job, elastic = parse_arguments(arguments, os.environ, prog=prog)
        with explain_missing(prog):
            failure = run_job(job, elastic, os.environ)
    except KeyboardInterrupt:
        # While the ranks run, Ctrl-C is forwarded to them. This one came before that, or during their termination.
        print_message("ended by SIGINT")
        return 128 + signal.SIGINT
    except ValueError as error:
        print_message(str(error))
        return 2
    except StartError as error:
        print_message(str(error))
        return error.exit_status
    except OSError as error:
        print_message(f"the launcher has failed: {error}")
        return 1
    if failure is None:
        return 0
    print_message(failure.describe())
    return failure.exit_status


def run_job(job: LaunchJob, elastic: ElasticOptions | None, environ: Mapping[str, str]) -> JobFailure | None:
    """Run a job to its end, as an elastic job if `elastic` is given; its smoke run first, which may fail.

    Raises:
        StartError: the command cannot be started.
        OSError: no port is available, or the output files cannot be written.
        ValueError: the job description is invalid.
    """
    if job.smoke_ranks is not None:
        environ = {name: value for name, value in environ.items() if name not in (SMOKE_STEPS, SMOKE_RANKS)}
        if (failure := run_smoke(job, environ)) is not None:
            return failure
    if elastic is None:
        return run_static_job(job, environ)
    # Imported here, because most jobs are not elastic, and do not need the driver.
    from datasvc.trainer.elastic.driver.driver import run_elastic_job

    return run_elastic_job(job, elastic, environ)


def parse_arguments(
    arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None, *, prog: str = "datasvc-run"
) -> tuple[LaunchJob, ElasticOptions | None]:
    """Return the job that the command line describes, with the options of an elastic job or None.

    An invalid command line exits with status 2; `--check-build`, `--version` and `--help` exit with status 0.

    Args:
        arguments: command-line arguments; None for those of this process.
        environ: environment in which to look for a Slurm allocation; None for no allocation.
        prog: name of the program in usage messages.
    """
    parser = _build_parser(prog)
    options = parser.parse_args(arguments)
    if options.check_build:
        print(describe_build())  # noqa: T201 - output of the command
        parser.exit(0)
    try:
        if options.config_file is not None:
            # Parse the command line after the file, so that its flags take precedence.
            command_line = sys.argv[1:] if arguments is None else arguments
            switches = {  # flags without a value
                flag
                for action in parser._actions  # noqa: SLF001 - argparse has no other list of its flags
                if action.nargs == 0
                for flag in action.option_strings
            }
            options = parser.parse_args([*read_config_file(options.config_file, switches), *command_line])
        return _read_job(options, {} if environ is None else environ)
    except ValueError as error:
        parser.error(str(error))


def _read_job(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[LaunchJob, ElasticOptions | None]:
    """Return the result of `parse_arguments` for parsed flags; raise ValueError if one of them is invalid."""
    # argparse keeps the separator "--" in the remaining arguments.
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ValueError("the program to run is missing; write it after the options, such as: python train.py")
    elastic = _read_elastic(options)
    hosts, shell = _read_hosts(options, environ, is_elastic=elastic is not None)
    num_ranks = _count_ranks(options, hosts)
    for flag in list_ignored(options):
        note = ": the ranks communicate over gloo, and over NCCL on GPUs" if flag in CONTROLLERS else ""
        print_message(f"{flag} has no effect on torch.distributed and is ignored{note}")
    variables = read_engine_flags(options)
    # `-x NAME=VALUE` sets a variable. `-x NAME` copies the launcher's variable to the ranks on other hosts.
    assignments = [text.partition("=") for text in options.x]
    variables.update({name: value for name, equals, value in assignments if equals})
    num_servers = options.servers or 0
    if num_servers:
        if elastic is not None or options.smoke is not None:
            raise ValueError("--servers does not go with elastic jobs and --smoke; its workers may be lost anyway")
        if num_servers >= num_ranks:
            raise ValueError(f"--servers {num_servers} leaves no worker of {num_ranks} ranks; start more with -np")
        variables[NUM_SERVERS] = str(num_servers)
    interfaces = (options.network_interface or "").split(",")
    job = LaunchJob(
        command=command,
        num_ranks=num_ranks,
        hosts=hosts,
        variables=variables,
        passed_names=tuple(name for name, _, _ in assignments),
        remote=RemoteSettings(
            shell=shell,
            ssh_port=options.ssh_port,
            ssh_identity_file=options.ssh_identity_file,
            python=options.remote_python,
            network_interfaces=tuple(name for name in interfaces if name),
        ),
        grace_s=options.grace_s,
        start_timeout_s=options.start_timeout,
        prefixes_lines=num_ranks > 1 and not options.no_prefix,
        stamps_lines=options.stamps_lines,
        output_folder=options.output_filename,
        is_verbose=options.verbose,
        smoke_ranks=options.smoke,
        smoke_timeout_s=options.smoke_timeout,
        num_servers=num_servers,
    )
    if options.smoke is not None:
        plan_smoke(job)  # only for its errors
    elif options.smoke_timeout is not None:
        raise ValueError("--smoke-timeout is the time limit of a smoke run: give --smoke as well")
    return job, elastic


def _read_hosts(
    options: argparse.Namespace, environ: Mapping[str, str], *, is_elastic: bool
) -> tuple[tuple[Host, ...], str]:
    """Return the hosts with their slots (places for ranks), and the remote shell: "ssh" or "srun"."""
    default_slots = options.slots_per_host or 1
    shell = options.remote_shell or "ssh"
    if options.hosts is not None and options.hostfile is not None:
        raise ValueError("give hosts with -H or with -hostfile, not both")
    if options.hosts is not None:
        return parse_hosts(options.hosts, default_slots=default_slots), shell
    if options.hostfile is not None:
        return read_host_file(options.hostfile, default_slots=default_slots), shell
    if is_elastic and options.host_discovery_script is not None:
        # The script will name the hosts.
        return (), shell
    hosts = read_allocation(environ, slots_per_host=options.slots_per_host)
    # Inside an allocation, srun is the default shell if it is installed.
    if options.remote_shell is None and hosts and shutil.which("srun", path=environ.get("PATH")):
        shell = "srun"
    if len(hosts) == 1 and options.num_proc is not None and is_local(hosts[0].name, environ):
        # Ignore an allocation of this machine only, because -np may then exceed Slurm's number of tasks.
        hosts = ()
    return hosts, shell


def _count_ranks(options: argparse.Namespace, hosts: Sequence[Host]) -> int:
    """Return the value of -np; without -np, the minimum of --min-num-proc, or else the number of all slots."""
    num_ranks = options.num_proc
    if num_ranks is None:
        num_ranks = options.min_num_proc or sum(host.num_slots for host in hosts)
    if num_ranks == 0:
        raise ValueError("the number of ranks is missing: give it with -np")
    assert isinstance(num_ranks, int)
    return num_ranks


def _read_elastic(options: argparse.Namespace) -> ElasticOptions | None:
    """Return the options of an elastic job; None if no flag makes the job elastic."""
    elastic_flags = (options.min_num_proc, options.max_num_proc, options.host_discovery_script)
    if all(value is None for value in elastic_flags):
        for name in ("elastic_timeout", "reset_limit", "blacklist_cooldown_range"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for elastic jobs: "
                    "give --min-num-proc, --max-num-proc or --host-discovery-script as well"
                )
        return None
    cooldown_range = options.blacklist_cooldown_range
    return ElasticOptions(
        # Without --min-num-proc, -np is also the minimum.
        min_num_ranks=options.min_num_proc or options.num_proc or 1,
        max_num_ranks=options.max_num_proc,
        discovery_script=options.host_discovery_script,
        slots_per_host=options.slots_per_host,
        elastic_timeout_s=options.elastic_timeout,
        reset_limit=options.reset_limit,
        cooldown_range_s=None if cooldown_range is None else tuple(cooldown_range),
    )


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=prog, description="Run a program as the ranks of one data-parallel job.")
    parser.add_argument("-np", "--num-proc", type=_positive, metavar="N", help="number of ranks")
    parser.add_argument(
        "--servers",
        type=_positive,
        metavar="N",
        help="the first N ranks are parameter servers, for --sync ssp and async; the others may be lost",
    )
    parser.add_argument("--no-prefix", action="store_true", help="print output lines without the prefix [rank]")
    parser.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        dest="stamps_lines",
        help="print the time before each output line",
    )
    parser.add_argument(
        "--output-filename", type=Path, metavar="DIR", help="also write DIR/rank.N/stdout and DIR/rank.N/stderr"
    )
    parser.add_argument(
        "--grace-s", type=float, default=5.0, help="seconds between SIGTERM and SIGKILL (default: %(default)s)"
    )
    parser.add_argument(
        "--start-timeout",
        type=_seconds,
        metavar="S",
        help="end the job if a rank has not started by then; an elastic job continues (default: only print a note)",
    )
    parser.add_argument(
        "--smoke",
        type=_positive,
        metavar="N",
        help="first run the command as N ranks on the first host for two steps, and start no job if that fails",
    )
    parser.add_argument(
        "--smoke-timeout", type=_seconds, metavar="S", help="seconds after which the smoke run fails (default: never)"
    )
    parser.add_argument("-x", action="append", default=[], metavar="NAME[=VALUE]", help="variable for all ranks")
    parser.add_argument("--verbose", action="store_true", help="print the host and the command of each rank")
    parser.add_argument("--config-file", type=Path, metavar="FILE", help="settings in YAML, JSON or TOML")
    parser.add_argument(
        "-cb", "--check-build", action="store_true", help="print the capabilities of this installation"
    )
    parser.add_argument("-v", "--version", action="version", version=_version())
    _add_host_flags(parser)
    _add_elastic_flags(parser)
    add_engine_flags(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _add_host_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts", "default: the Slurm allocation of the launcher, else this machine")
    group.add_argument("-H", "--hosts", "--host", metavar="A:2,B:2", help="hosts and their slots")
    group.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help="lines such as: a slots=2")
    group.add_argument(
        "--slots-per-host", type=_positive, metavar="N", help="slots of hosts without a number of slots"
    )
    group.add_argument("-p", "--ssh-port", type=_positive, metavar="PORT", help="port of the ssh servers")
    group.add_argument("-i", "--ssh-identity-file", type=Path, metavar="FILE", help="private key for ssh")
    group.add_argument("--remote-shell", choices=("ssh", "srun"), help="remote shell for other hosts")
    group.add_argument(
        "--remote-python", metavar="PATH", help="Python interpreter on other hosts (default: the path of this one)"
    )
    group.add_argument(
        "--network-interface", "--network-interfaces", metavar="NAMES", help="interfaces that connect the hosts"
    )


def _add_elastic_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("elastic", "jobs whose number of ranks may change")
    group.add_argument("--min-num-proc", "--min-np", type=_positive, metavar="N", help="minimum number of ranks")
    group.add_argument("--max-num-proc", "--max-np", type=_positive, metavar="N", help="maximum number of ranks")
    group.add_argument("--host-discovery-script", metavar="PATH", help="script that prints lines such as: a:2")
    group.add_argument("--elastic-timeout", type=_seconds, metavar="S", help="maximum time to wait for enough slots")
    group.add_argument(
        "--reset-limit", type=_positive, metavar="N", help="end with status 3 after N changes of ranks"
    )
    group.add_argument(
        "--blacklist-cooldown-range",
        type=_seconds,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds for which a host gets no ranks after a failure",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _version() -> str:
    try:
        return version("datasvc")
    except PackageNotFoundError:
        return "unknown"


def describe_build() -> str:
    """Return horovodrun's table of what is available, and advice for each that is not. Imports torch if it can."""
    frameworks, has_distributed, operations = _list_torch_features()
    foreign: list[_Feature] = [
        (name, False, "exists in Horovod only; Gloo and NCCL replace it") for name in _FOREIGN_OPERATIONS
    ]
    # srun and mpirun need nothing in this installation: `init` reads the variables that they set.
    launchers: list[_Feature] = [
        ("this one", True, ""),
        ("torchrun", has_distributed, "comes with PyTorch"),
        ("srun", True, ""),
        ("mpirun", True, ""),
    ]
    tables = {"Frameworks": frameworks, "Launchers": launchers, "Tensor operations": [*operations, *foreign]}
    # The table has the rows of Horovod's table. These features, which only some jobs need, are listed if missing.
    others: list[_Feature] = [
        ("ssh", shutil.which("ssh") is not None, "starts ranks on other hosts; install an OpenSSH client"),
        ("PyYAML", find_spec("yaml") is not None, "reads --config-file in YAML; pip install pyyaml"),
    ]
    sections = [
        [f"{title}:", *(f"    [{'X' if is_available else ' '}] {name}" for name, is_available, _ in features)]
        for title, features in tables.items()
    ]
    features = [feature for group in (*tables.values(), others) for feature in group]
    missing = [f"    {name}: {advice}" for name, is_available, advice in features if not is_available]
    return "\n\n".join("\n".join(lines) for lines in [*sections, ["Not available:", *missing]])


def _list_torch_features() -> tuple[list[_Feature], bool, list[_Feature]]:
    """Return the frameworks, whether torch.distributed is available, and the operations that torch has."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        advice = f"cannot be imported ({error}); pip install torch, see {_TORCH_BUILDS}"
        return (
            [("PyTorch", False, advice)],
            False,
            [(name, False, "needs PyTorch") for name in ("Gloo", "NCCL", "CUDA")],
        )
    has_distributed = dist.is_available()
    cuda_advice = "torch finds no GPU; check nvidia-smi and the driver"
    if torch.version.cuda is None and torch.version.hip is None:
        cuda_advice = f"this build of torch is for CPUs; for GPUs install another one, see {_TORCH_BUILDS}"
    build_advice = f"this build of torch lacks it; install another one, see {_TORCH_BUILDS}"
    operations = [
        ("Gloo", has_distributed and dist.is_gloo_available(), build_advice),
        ("NCCL", has_distributed and dist.is_nccl_available(), f"for GPUs; {build_advice}"),
        ("CUDA", torch.cuda.is_available(), cuda_advice),
    ]
    return [("PyTorch " + torch.__version__, True, "")], has_distributed, operations
