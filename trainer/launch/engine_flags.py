"""horovodrun's flags that only set a variable which the engine reads in every rank, and those that mean nothing here.

A flag is given to ranks only if it is on the command line or in the configuration file, so that a variable of the
environment stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True, kw_only=True)
class EngineFlag:
    """A flag with a value, and its variable, which gets the value times `scale`."""

    flag: str
    variable: str
    help: str
    value_type: type[int | float | str] = str
    scale: int = 1
    choices: tuple[str, ...] | None = None
    least: float = 0


@dataclass(frozen=True, kw_only=True)
class EngineSwitch:
    """A flag without a value, its opposite, and their variable."""

    flag: str
    opposite: str
    variable: str
    help: str


VALUES = (
    EngineFlag(
        flag="--fusion-threshold-mb",
        variable="HOROVOD_FUSION_THRESHOLD",
        value_type=float,
        scale=1 << 20,
        help="size of a fusion buffer in MiB; 0 to reduce each tensor alone",
    ),
    EngineFlag(
        flag="--cycle-time-ms",
        variable="HOROVOD_CYCLE_TIME",
        value_type=float,
        help="milliseconds between negotiations",
    ),
    EngineFlag(
        flag="--cache-capacity",
        variable="HOROVOD_CACHE_CAPACITY",
        value_type=int,
        help="operations whose negotiation is remembered",
    ),
    EngineFlag(
        flag="--timeline-filename",
        variable="HOROVOD_TIMELINE",
        help="write a chrome trace of all operations to this file",
    ),
    EngineFlag(
        flag="--stall-check-warning-time-seconds",
        variable="HOROVOD_STALL_CHECK_TIME_SECONDS",
        value_type=int,
        help="warn when a rank has waited this long for others",
    ),
    EngineFlag(
        flag="--stall-check-shutdown-time-seconds",
        variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        value_type=int,
        help="end the job when a rank has waited this long; 0 for never",
    ),
    EngineFlag(
        flag="--autotune-log-file", variable="HOROVOD_AUTOTUNE_LOG", help="where autotune writes what it tried"
    ),
    EngineFlag(
        flag="--autotune-warmup-samples",
        variable="HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        value_type=int,
        help="samples that autotune ignores at first",
    ),
    EngineFlag(
        flag="--autotune-steps-per-sample",
        variable="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        value_type=int,
        least=1,
        help="steps per sample of autotune",
    ),
    EngineFlag(
        flag="--autotune-bayes-opt-max-samples",
        variable="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        value_type=int,
        least=1,
        help="samples after which autotune settles",
    ),
    EngineFlag(
        flag="--autotune-gaussian-process-noise",
        variable="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        value_type=float,
        help="expected noise of autotune's samples",
    ),
    EngineFlag(
        flag="--gloo-timeout-seconds",
        variable="HOROVOD_GLOO_TIMEOUT_SECONDS",
        value_type=int,
        least=1,
        help="after which a collective that waits for a rank fails",
    ),
    EngineFlag(
        flag="--log-level", variable="HOROVOD_LOG_LEVEL", choices=_LOG_LEVELS, help="least level that is logged"
    ),
)
SWITCHES = (
    EngineSwitch(
        flag="--timeline-mark-cycles",
        opposite="--no-timeline-mark-cycles",
        variable="HOROVOD_TIMELINE_MARK_CYCLES",
        help="mark negotiations in the timeline",
    ),
    EngineSwitch(
        flag="--no-stall-check",
        opposite="--stall-check",
        variable="HOROVOD_STALL_CHECK_DISABLE",
        help="say nothing when ranks wait for others",
    ),
    EngineSwitch(
        flag="--autotune",
        opposite="--no-autotune",
        variable="HOROVOD_AUTOTUNE",
        help="search for the best fusion threshold and cycle time",
    ),
    EngineSwitch(
        flag="--log-hide-timestamp",
        opposite="--no-log-hide-timestamp",
        variable="HOROVOD_LOG_HIDE_TIME",
        help="log lines without the time",
    ),
    EngineSwitch(
        flag="--log-without-timestamp",
        opposite="--log-with-timestamp",
        variable="HOROVOD_LOG_HIDE_TIME",
        help="the same",
    ),
)
# Accepted, so that command lines written for Horovod run; True for those that take a value.
WITHOUT_MEANING = {
    "--hierarchical-allreduce": False,
    "--no-hierarchical-allreduce": False,
    "--hierarchical-allgather": False,
    "--no-hierarchical-allgather": False,
    "--torus-allreduce": False,
    "--no-torus-allreduce": False,
    "--mpi-threads-disable": False,
    "--no-mpi-threads-disable": False,
    "--mpi-args": True,
    "--binding-args": True,
    "--tcp": False,
    "--tcp-flag": False,
    "--num-nccl-streams": True,
    "--thread-affinity": True,
    "--mpi": False,
    "--jsrun": False,
}
# Of these, what other processes would run the job with.
CONTROLLERS = ("--mpi", "--jsrun", "--mpi-args")
# Without meaning too, and what they ask for is so anyway: no word is lost about them.
ALREADY_SO = (
    "--gloo",
    "--disable-cache",
    "--no-hierarchical-allreduce",
    "--no-torus-allreduce",
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all of these flags to a parser."""
    group = parser.add_argument_group("engine", "set the HOROVOD_* variables that every rank reads")
    for flag in VALUES:
        group.add_argument(
            flag.flag,
            dest=flag.variable,
            type=_number(flag) if flag.value_type is not str else str,
            choices=flag.choices,
            help=flag.help,
            metavar=None if flag.choices else flag.value_type.__name__.upper(),
        )
    for switch in SWITCHES:
        group.add_argument(switch.flag, dest=switch.variable, action="store_const", const="1", help=switch.help)
        group.add_argument(
            switch.opposite, dest=switch.variable, action="store_const", const="0", help=argparse.SUPPRESS
        )
    for name, takes_value in WITHOUT_MEANING.items():
        action = "store" if takes_value else "store_true"
        parser.add_argument(name, action=action, dest=f"ignored {name}", help=argparse.SUPPRESS)
    for name in ALREADY_SO:
        if name not in WITHOUT_MEANING:
            parser.add_argument(name, action="store_true", dest=f"accepted {name}", help=argparse.SUPPRESS)


def read_engine_flags(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the parsed flags set."""
    given = vars(options)
    return {
        flag.variable: str(given[flag.variable]) for flag in (*VALUES, *SWITCHES) if given[flag.variable] is not None
    }


def list_ignored(options: argparse.Namespace) -> list[str]:
    """The flags that were given and mean nothing on torch.distributed."""
    given = vars(options)
    return [name for name in WITHOUT_MEANING if given.get(f"ignored {name}") and name not in ALREADY_SO]


def _number(flag: EngineFlag) -> Callable[[str], str]:
    def convert(text: str) -> str:
        try:
            value = flag.value_type(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        assert isinstance(value, int | float)
        if not flag.least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is too small" if value < flag.least else f"{text} is no number")
        return str(int(value * flag.scale) if flag.scale != 1 else value)

    return convert
