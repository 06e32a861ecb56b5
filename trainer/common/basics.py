"""The name of `horovod.common.basics`: what a job is and what is built, as methods of one object."""

from __future__ import annotations

from typing import Any

from datasvc.trainer.job import capabilities, runtime

_METHODS = {
    "init",
    "shutdown",
    "is_initialized",
    "start_timeline",
    "stop_timeline",
    "size",
    "local_size",
    "cross_size",
    "rank",
    "local_rank",
    "cross_rank",
    "is_homogeneous",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
}

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions of the trainer of the same names, such as `rank`.

    Args:
        pkg_path, args: where Horovod finds its compiled library; there is none here.
    """

    def __init__(self, pkg_path: str = "", *args: str) -> None:  # Horovod's signature
        del pkg_path, args

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"'HorovodBasics' has no attribute {name!r}")
        return getattr(runtime if hasattr(runtime, name) else capabilities, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_METHODS})
