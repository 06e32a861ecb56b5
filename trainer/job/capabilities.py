"""What Horovod's scripts ask about how it was built: here it is torch.distributed that answers."""

import torch
import torch.distributed as dist


def mpi_threads_supported() -> bool:
    """False: there is no MPI."""
    return False


def mpi_enabled() -> bool:
    """False: there is no MPI."""
    return False


def mpi_built() -> bool:
    """False: there is no MPI."""
    return False


def gloo_enabled() -> bool:
    """Whether torch has gloo, which requests always travel over, and tensors of the CPU too."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_built() -> bool:
    """As ``gloo_enabled``."""
    return gloo_enabled()


def nccl_built() -> int:
    """The version of NCCL as one number, such as 22703; 0 without."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]  # type: ignore[no-untyped-call]  # torch has no types here
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """False: IBM's library is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's library is not used."""
    return False


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None
