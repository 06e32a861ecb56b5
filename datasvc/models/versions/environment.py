"""Describes the environment of a run, for the entry of its versions: interpreter, packages, CUDA and GPUs.

CUDA is not started on a GPU that the program does not use. The host name is left out unless it is requested.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = (
    "datasvc", "torch", "numpy", "pyarrow", "zstandard", "blake3", "fsspec", "s3fs", "pillow", "nvidia-dali-cuda120",
    "nvidia-dali-cuda130", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torchvision", "triton", "flash-attn",
    "safetensors", "tokenizers", "transformers", "accelerate", "lightning", "pytorch-lightning", "deepspeed",
)  # fmt: skip
"""Packages whose versions are recorded if they are installed."""
_PROC: Final = Path("/proc/driver/nvidia")  # files of NVIDIA's driver for Linux


def describe_environment(*, world_size: int | None = None, hostname: bool = False) -> dict[str, Any]:
    """Return the environment of this process as JSON values; values that are not available are left out.

    Args:
        world_size: number of processes of the job; None: that of torch.distributed, if it is initialized.
        hostname: whether to include the host name.

    Returns:
        `python`, `platform`, `cpus` (number of processors that this process may use), `packages` (version by name),
        `gpus` (number of GPUs by model), `driver` (version of NVIDIA's driver), `cuda`, `cudnn`, `world_size`,
        `hostname`.
    """
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        # Copy, because the caller may change the result, but must not change the cached dict.
        "packages": dict(_describe_packages()),
        **_describe_gpus(),
    }
    size = _world_size() if world_size is None else world_size
    if size is not None:
        environment["world_size"] = size
    if hostname:
        environment["hostname"] = socket.gethostname()
    return environment


@lru_cache(maxsize=1)
def _describe_packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _describe_gpus() -> dict[str, Any]:
    """Return the fields `driver`, `cuda`, `cudnn` and `gpus` that are available.

    If this process has started CUDA, `gpus` has the GPUs that it sees; otherwise all GPUs of the node.
    """
    gpu_fields: dict[str, Any] = {}
    driver = _driver()
    if driver is not None:
        gpu_fields["driver"] = driver
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        gpu_fields["cuda"] = torch.version.cuda
        # Querying a GPU that the program does not use would create a context on it, of some hundred megabytes.
        if torch.cuda.is_initialized():
            gpu_fields["cudnn"] = torch.backends.cudnn.version()
            gpu_fields["gpus"] = dict(Counter(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))))
            return gpu_fields
    gpus = _driver_gpus()
    return gpu_fields | ({"gpus": gpus} if gpus else {})


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None if there is no driver."""
    with suppress(OSError):
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", (_PROC / "version").read_text(errors="replace"))
        return match[1] if match else None
    return None


def _driver_gpus() -> dict[str, int]:
    """Return the number of GPUs of the node by model, as listed by the driver."""
    models: Counter[str] = Counter()
    with suppress(OSError):
        for path in _PROC.glob("gpus/*/information"):
            match = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.MULTILINE)
            models.update([match[1]] if match else [])
    return dict(models)


def _world_size() -> int | None:
    """Return the number of processes of torch.distributed; None if it is not initialized."""
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())
