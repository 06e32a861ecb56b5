"""Horovod's functions, such as `nccl_built`, that return which features are available with the installed torch."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_built() -> bool:
    """Return False: the trainer does not use MPI, IBM's DDL or Intel's oneCCL."""
    return False


mpi_threads_supported = mpi_enabled = ddl_built = ccl_built = mpi_built


def gloo_enabled() -> bool:
    """Return whether torch has gloo. The trainer uses it for all requests, and for tensors on CPUs."""
    return dist.is_available() and dist.is_gloo_available()


gloo_built = gloo_enabled


def nccl_built() -> int:
    """Return the version of NCCL as one number, such as 22703; 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    # Take three numbers: torch may append a suffix, and a missing number counts as 0.
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]  # type: ignore[no-untyped-call]  # untyped in torch
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None
