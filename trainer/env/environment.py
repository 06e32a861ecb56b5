"""Reads environment variables of launchers and of Horovod: the placement of a rank, engine settings, logging.

`hvd.init` calls these functions. Launchers set the variables of a placement for each rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from datasvc.trainer.env.foreign_launchers import parse_whole, translate

_LOG_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
# torchrun's names of the first four fields of `RankPlacement`, in the same order.
WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SMOKE_STEPS: Final = "DATASVC_SMOKE_STEPS"
"""Variable of a smoke run, `datasvc-run --smoke`: the number of its steps."""
SMOKE_RANKS: Final = "DATASVC_SMOKE_RANKS"
"""Likewise: the number of ranks of the job that starts after it."""

NUM_SERVERS: Final = "DATASVC_SERVERS"
"""Variable of a job with parameter servers, `datasvc-run --servers`: how many of its first ranks serve."""


@dataclass(frozen=True)
class RankPlacement:
    """The rank of a process in the job, its local rank on its node, and the number of its node (cross rank).

    Each has a size: the number of ranks in the job, of ranks on this node, and of nodes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1


def read_placement(environ: Mapping[str, str]) -> RankPlacement:
    """Return the placement that a launcher (ours, torchrun, srun or mpirun) gave this process; else rank 0 of 1.

    Raises:
        ValueError: only some of the launcher's variables are set, or they contradict each other.
    """
    environ = {**environ, **translate(environ)}
    present = [name for name in WORLD_VARIABLES if name in environ]
    # If neither RANK nor WORLD_SIZE is set, there is no job, and the other two are ignored.
    if not {"RANK", "WORLD_SIZE"} & set(present):
        return RankPlacement()
    missing = sorted(set(WORLD_VARIABLES) - set(present))
    if missing:
        raise ValueError(
            f"the environment has {', '.join(present)} but lacks {', '.join(missing)}; set all of them, or none"
        )
    rank, size, local_rank, local_size = (parse_whole(environ[name], name) for name in WORLD_VARIABLES)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ValueError(
            f"invalid placement: rank {rank} of {size}, local rank {local_rank} of {local_size}; "
            "check RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    # Without variables for the nodes, assume that every node has as many ranks as this one, except perhaps the last.
    cross_rank, cross_size = _read_cross(environ) or (rank // local_size, -(-size // local_size))
    return RankPlacement(rank, size, local_rank, local_size, cross_rank, cross_size)


def smoke_steps() -> int | None:
    """Return the number of steps after which a program must end without results; None outside of a smoke run.

    `datasvc-run --smoke N` runs the program so before the job starts. Available before `init`.

    Raises:
        ValueError: the variable is not a whole number.
    """
    text = os.environ.get(SMOKE_STEPS)
    return parse_whole(text, SMOKE_STEPS) if text else None


def read_num_servers(environ: Mapping[str, str]) -> int:
    """Return the number of first ranks that are parameter servers; 0 without the variable.

    Raises:
        ValueError: the variable is not a whole number.
    """
    text = environ.get(NUM_SERVERS)
    return parse_whole(text, NUM_SERVERS) if text else 0


def placement_variables(placement: RankPlacement) -> dict[str, str]:
    """Return the environment variables of a placement, with the names of torchrun and with those of Horovod."""
    numbers = {name: str(number) for name, number in asdict(placement).items()}
    # The last two fields, the cross rank and the cross size, are set with Horovod's names only.
    torchrun = dict(zip(WORLD_VARIABLES, numbers.values(), strict=False))
    # Horovod's variables are the names of the fields: HOROVOD_RANK to HOROVOD_CROSS_SIZE.
    return torchrun | {f"HOROVOD_{name.upper()}": number for name, number in numbers.items()}


def choose_gloo_interface(environ: Mapping[str, str]) -> dict[str, str]:
    """Return Gloo's variable for the interface in Horovod's variable; {} if there is none, or Gloo's is set."""
    name = environ.get("HOROVOD_GLOO_IFACE")
    return {"GLOO_SOCKET_IFNAME": name} if name and "GLOO_SOCKET_IFNAME" not in environ else {}


def configure_logging(environ: Mapping[str, str]) -> None:
    """Configure the level and the format of the trainer's logger by Horovod's variables; do nothing if none is set.

    If the program has installed handlers, only the level is set.

    Raises:
        ValueError: HOROVOD_LOG_LEVEL is not a valid level.
    """
    if not {"HOROVOD_LOG_LEVEL", "HOROVOD_LOG_HIDE_TIME", "HOROVOD_LOG_TIMESTAMP"} & set(environ):
        return
    level = environ.get("HOROVOD_LOG_LEVEL", "WARNING")
    if level.upper() not in _LOG_LEVELS:
        raise ValueError(f"HOROVOD_LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}, not {level!r}")
    logger = logging.getLogger("datasvc.trainer")
    logger.setLevel(_LOG_LEVELS[level.upper()])
    # The program or an earlier call may have added a handler; a second handler would print each line twice.
    if logger.hasHandlers():
        return
    # Lines have the time unless one of two variables turns it off. HOROVOD_LOG_TIMESTAMP is on by default.
    has_timestamp = _is_on({"HOROVOD_LOG_TIMESTAMP": "1", **environ}, "HOROVOD_LOG_TIMESTAMP")
    hides_time = _is_on(environ, "HOROVOD_LOG_HIDE_TIME") or not has_timestamp
    handler = logging.StreamHandler()
    time = "" if hides_time else "%(asctime)s "
    handler.setFormatter(logging.Formatter(f"{time}%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)


def _read_cross(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the cross rank and the cross size from the launcher's variables; None if they are not set."""
    # Without these variables, `read_placement` must assume that all nodes have the same number of ranks.
    for names in (("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE")):
        if all(name in environ for name in names):
            cross_rank, cross_size = (parse_whole(environ[name], name) for name in names)
            if not 0 <= cross_rank < cross_size:
                raise ValueError(f"invalid placement: node {cross_rank} of {cross_size}; check {' and '.join(names)}")
            return cross_rank, cross_size
    return None


def read_engine_settings(environ: Mapping[str, str]) -> EngineSettings:
    """Return the engine settings from Horovod's variables; settings without a variable keep their defaults.

    Raises:
        ValueError: a value is not a number, or is out of range.
    """
    defaults = EngineSettings()
    warning_s = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", defaults.stall_warning_s)
    timeline = environ.get("HOROVOD_TIMELINE") or None
    return EngineSettings(
        fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", defaults.fusion_bytes)),
        # HOROVOD_CYCLE_TIME is in milliseconds.
        cycle_time_s=_number(environ, "HOROVOD_CYCLE_TIME", defaults.cycle_time_s * 1e3) / 1e3,
        stall_warning_s=0.0 if _is_on(environ, "HOROVOD_STALL_CHECK_DISABLE") else warning_s,
        stall_shutdown_s=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", defaults.stall_shutdown_s),
        cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", defaults.cache_capacity)),
        timeout_s=_number(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", defaults.timeout_s),
        start_timeout_s=_number(environ, "HOROVOD_START_TIMEOUT", defaults.start_timeout_s),
        # "DYNAMIC" means that the program starts the trace by start_timeline(), which needs no setting.
        timeline=None if timeline == "DYNAMIC" else timeline,
        timeline_marks_cycles=_is_on(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
        hierarchical_allreduce=(
            _is_on(environ, "HOROVOD_HIERARCHICAL_ALLREDUCE")
            if environ.get("HOROVOD_HIERARCHICAL_ALLREDUCE")
            else None
        ),
        autotune=_is_on(environ, "HOROVOD_AUTOTUNE"),
        autotune_log=environ.get("HOROVOD_AUTOTUNE_LOG") or None,
    )


def is_under_nvtx_tool(environ: Mapping[str, str]) -> bool:
    """Return whether a tool that reads NVTX ranges started this process, or `DATASVC_NVTX=1` is set."""
    # Such tools set the path of a library that NVTX loads. Nsight Systems also sets the ID of its session.
    tools = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
    return _is_on(environ, "DATASVC_NVTX") or any(environ.get(name) for name in tools)


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0").strip().lower() not in ("", "0", "false", "no", "off")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ.get(name, default))
    except ValueError:
        raise ValueError(f"{name} must be a number, not {environ[name]!r}") from None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine. They must be equal on all ranks.

    Args:
        fusion_bytes: maximum size of a fusion buffer; 0 disables fusion.
        cycle_time_s: unit of the pause between two negotiations while nothing is submitted. An idle engine pauses for
            up to fifty times this value, or up to five times with process sets. A busy engine does not pause.
        stall_warning_s: seconds after which an operation that some ranks have not submitted is logged; 0 for never.
        stall_shutdown_s: seconds after which an operation that some ranks have not submitted ends the job; 0 for
            never.
        cache_capacity: maximum number of cached requests. A rank sends one bit for each of them.
        timeout_s: seconds for which a rank may be unreachable before the operations of the others fail.
        start_timeout_s: seconds for which `init` waits for all ranks.
        timeline: path for a Chrome trace of all operations, written by rank 0; None for no trace.
        timeline_marks_cycles: whether the trace contains the cycles of the engine.
        hierarchical_allreduce: whether sums and averages of floating-point tensors over all ranks are reduced inside
            each node first, if there are several nodes with equally many ranks, more than one; otherwise they are
            flat. None: flat, but `autotune` tries both.
        autotune: whether to search for the best `fusion_bytes` and `cycle_time_s` while the job runs.
        autotune_log: path for a CSV file of the values that `autotune` tried, written by rank 0; None for no file.

    Raises:
        ValueError: a value is out of range.
    """

    fusion_bytes: int = 128 * 1024 * 1024
    cycle_time_s: float = 0.001
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0
    cache_capacity: int = 1024
    timeout_s: float = 1800.0
    start_timeout_s: float = 600.0
    timeline: str | None = None
    timeline_marks_cycles: bool = False
    hierarchical_allreduce: bool | None = None
    autotune: bool = False
    autotune_log: str | None = None

    def __post_init__(self) -> None:
        for name in ("fusion_bytes", "cycle_time_s", "stall_warning_s", "stall_shutdown_s", "cache_capacity"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        for name in ("timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, but is {getattr(self, name)}")


def find_gpu_uuid(placement: RankPlacement) -> str:
    """Return the UUID of the GPU for this rank. Two ranks with the same UUID share a GPU.

    The UUID is "" without GPUs or NCCL: then the ranks communicate over Gloo only.
    """
    # Imported here, because the launcher uses this module without torch.
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return ""
    # A launcher exposes to each rank either all GPUs of the node, or one GPU.
    has_all_gpus = torch.cuda.device_count() >= placement.local_size
    number = placement.local_rank if has_all_gpus else torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(number).uuid)
