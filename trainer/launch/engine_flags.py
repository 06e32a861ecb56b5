"""horovodrun's flags that set an environment variable for the engine of every rank, and flags that have no effect.

A variable is set only if its flag is on the command line or in the configuration file. Otherwise the ranks inherit
the value of the launcher's environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class EngineFlag:
    """A flag that takes a value, and the environment variable that is set to this value.

    A number must be at least `minimum`, and is multiplied by `scale`, for example from MiB to bytes.
    """

    flag: str
    variable: str
    help: str
    value_type: type[int | float | str] = str
    _: KW_ONLY
    scale: int = 1
    choices: tuple[str, ...] | None = None
    minimum: float = 0


@dataclass(frozen=True)
class EngineSwitch:
    """A flag that takes no value and sets `variable` to 1, and the opposite flag, which sets it to 0."""

    flag: str
    opposite: str
    variable: str
    help: str


VALUES = (
    EngineFlag(
        "--fusion-threshold-mb",
        "HOROVOD_FUSION_THRESHOLD",
        "size of a fusion buffer in MiB; 0 to reduce each tensor separately",
        float,
        scale=1 << 20,
    ),
    EngineFlag("--cycle-time-ms", "HOROVOD_CYCLE_TIME", "milliseconds between negotiations", float),
    EngineFlag(
        "--cache-capacity", "HOROVOD_CACHE_CAPACITY", "maximum number of operations whose negotiation is cached", int
    ),
    EngineFlag("--timeline-filename", "HOROVOD_TIMELINE", "write a Chrome trace of all operations to this file"),
    EngineFlag(
        "--stall-check-warning-time-seconds",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "warn when a rank has waited this long for others",
        int,
    ),
    EngineFlag(
        "--stall-check-shutdown-time-seconds",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "end the job when a rank has waited this long; 0 for never",
        int,
    ),
    EngineFlag("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", "CSV file for the samples of autotune"),
    EngineFlag(
        "--autotune-warmup-samples",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        "number of first samples that autotune ignores",
        int,
    ),
    EngineFlag(
        "--autotune-steps-per-sample",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        "number of steps per sample of autotune",
        int,
        minimum=1,
    ),
    EngineFlag(
        "--autotune-bayes-opt-max-samples",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "number of samples after which autotune stops",
        int,
        minimum=1,
    ),
    EngineFlag(
        "--autotune-gaussian-process-noise",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "expected noise of autotune's samples",
        float,
    ),
    EngineFlag(
        "--gloo-timeout-seconds",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "time after which a collective that waits for a rank fails",
        int,
        minimum=1,
    ),
    EngineFlag("--log-level", "HOROVOD_LOG_LEVEL", "minimum level of log messages", choices=_LOG_LEVELS),
)
SWITCHES = (
    EngineSwitch(
        "--timeline-mark-cycles",
        "--no-timeline-mark-cycles",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        "mark negotiations in the timeline",
    ),
    EngineSwitch(
        "--no-stall-check", "--stall-check", "HOROVOD_STALL_CHECK_DISABLE", "do not warn when ranks wait for others"
    ),
    EngineSwitch(
        "--autotune", "--no-autotune", "HOROVOD_AUTOTUNE", "search for the best fusion threshold and cycle time"
    ),
    EngineSwitch(
        "--hierarchical-allreduce",
        "--no-hierarchical-allreduce",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "sum inside each node before sums are sent between nodes",
    ),
    EngineSwitch(
        "--log-hide-timestamp", "--no-log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", "omit the time in log lines"
    ),
    EngineSwitch(
        "--log-without-timestamp", "--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", "same as --log-hide-timestamp"
    ),
)
# Flags that are accepted without effect, so that command lines for Horovod work; True if the flag takes a value.
WITHOUT_MEANING = {
    "--hierarchical-allgather": False,
    "--no-hierarchical-allgather": False,
    "--torus-allreduce": False,
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
# Those of `WITHOUT_MEANING` that choose Horovod's controller, the part that starts and connects the ranks.
CONTROLLERS = ("--mpi", "--jsrun", "--mpi-args")
# Flags that are accepted without effect and without a note: the trainer always behaves as they request.
ALREADY_SO = ("--gloo", "--disable-cache", "--no-torus-allreduce")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of this module to a parser."""
    group = parser.add_argument_group("engine", "set the HOROVOD_* variables that every rank reads")
    for flag in VALUES:
        group.add_argument(
            flag.flag,
            dest=flag.variable,
            type=_number_parser(flag) if flag.value_type is not str else str,
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
        parser.add_argument(name, action="store_true", dest=f"accepted {name}", help=argparse.SUPPRESS)


def read_engine_flags(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the parsed flags set."""
    values = vars(options)
    return {
        flag.variable: str(values[flag.variable])
        for flag in (*VALUES, *SWITCHES)
        if values[flag.variable] is not None
    }


def list_ignored(options: argparse.Namespace) -> list[str]:
    """Return those flags of `WITHOUT_MEANING` that are on the command line, for a note."""
    values = vars(options)
    return [name for name in WITHOUT_MEANING if values[f"ignored {name}"]]


def _number_parser(flag: EngineFlag) -> Callable[[str], str]:
    def convert(text: str) -> str:
        try:
            value = flag.value_type(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        assert isinstance(value, int | float)
        if value < flag.minimum:
            raise argparse.ArgumentTypeError(f"{text} is too small; write a number of at least {flag.minimum}")
        # Written with `not`, so that NaN is refused too.
        if not value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        # A scaled value is a number of bytes, so it must be an integer.
        return str(int(value * flag.scale) if flag.scale != 1 else value)

    return convert
