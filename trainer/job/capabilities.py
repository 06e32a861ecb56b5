"""Horovod's queries of built-in features, answered from torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_threads_supported() -> bool:
    """Return False: the trainer does not use MPI."""
    return False


def mpi_enabled() -> bool:
    """Return False: the trainer does not use MPI."""
    return False


def mpi_built() -> bool:
    """Return False: the trainer does not use MPI."""
    return False


def gloo_enabled() -> bool:
    """Return whether torch has gloo, which sends all requests and the tensors on CPUs."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_built() -> bool:
    """Return the same as `gloo_enabled`."""
    return gloo_enabled()


def nccl_built() -> int:
    """Return the version of NCCL as one number, such as 22703; 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]  # type: ignore[no-untyped-call]  # untyped in torch
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Return False: the trainer does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: the trainer does not use Intel's oneCCL."""
    return False


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None
