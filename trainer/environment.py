"""Reads the environment: the only file of the trainer that does, but for torch's own rendezvous variables."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.engine.settings import EngineSettings

WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """Where this process stands: in the job, on its node (local), and among the nodes (cross)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1


def read_place(environ: Mapping[str, str]) -> Place:
    """The place that a launcher (ours or torchrun) gave this process, or a world of one.

    Raises:
        ValueError: only some of the launcher's variables are set, or they contradict each other.
    """
    present = [name for name in WORLD_VARIABLES if name in environ]
    if not {"RANK", "WORLD_SIZE"} & set(present):
        return Place()
    missing = sorted(set(WORLD_VARIABLES) - set(present))
    if missing:
        raise ValueError(f"the environment has {', '.join(present)} but lacks {', '.join(missing)}")
    rank, size, local_rank, local_size = (_whole(environ, name) for name in WORLD_VARIABLES)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ValueError(
            f"impossible place: rank {rank} of {size}, local rank {local_rank} of {local_size}; "
            "check RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    cross_rank, cross_size = rank // local_size, -(-size // local_size)
    return Place(rank, size, local_rank, local_size, cross_rank, cross_size)


def read_engine_settings(environ: Mapping[str, str]) -> EngineSettings:
    """Engine settings under Horovod's names; what is not set keeps its default.

    Raises:
        ValueError: a value is not a number or out of range.
    """
    defaults = EngineSettings()
    return EngineSettings(
        fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", defaults.fusion_bytes)),
        cycle_time_s=_number(environ, "HOROVOD_CYCLE_TIME", defaults.cycle_time_s * 1e3) / 1e3,
        stall_warning_s=_number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", defaults.stall_warning_s),
        cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", defaults.cache_capacity)),
        timeout_s=_number(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", defaults.timeout_s),
    )


def _whole(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {environ[name]!r}") from None


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ.get(name, default))
    except ValueError:
        raise ValueError(f"{name} must be a number, not {environ[name]!r}") from None
