"""What a run executes in, beside its code: interpreter, packages, CUDA, GPUs. Nothing that names a machine."""

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
"""Packages whose versions are recorded where they are installed."""
_PROC: Final = Path("/proc/driver/nvidia")


def describe_environment(*, world_size: int | None = None, hostname: bool = False) -> dict[str, Any]:
    """Return what this process runs in, as JSON values; what there is none of is left out.

    Args:
        world_size: processes of the job; None: that of torch.distributed where it is set up.
        hostname: say which machine this is, too.

    Returns:
        `python`, `platform`, `cpus` (processors of this process), `packages` by name, `gpus` (a count by model of
        those that are visible), `driver` (of NVIDIA), `cuda`, `cudnn`, `world_size`, `hostname`.
    """
    # A copy: the caller may add to it, and keeps no hold on ours.
    told: dict[str, Any] = {**_describe_process(), **_describe_gpus()}
    size = _world_size() if world_size is None else world_size
    if size is not None:
        told["world_size"] = size
    if hostname:
        told["hostname"] = socket.gethostname()
    return told


@lru_cache(maxsize=1)
def _describe_packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _describe_process() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": dict(_describe_packages()),
    }


def _describe_gpus() -> dict[str, Any]:
    told: dict[str, Any] = {}
    driver = _driver()
    if driver is not None:
        told["driver"] = driver
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        told["cuda"] = torch.version.cuda
        # Asking a GPU that the program does not use would set up a context on it, of some hundred megabytes.
        if torch.cuda.is_initialized():
            told["cudnn"] = torch.backends.cudnn.version()
            told["gpus"] = dict(Counter(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))))
            return told
    gpus = _driver_gpus()
    return told | ({"gpus": gpus} if gpus else {})


def _driver() -> str | None:
    with suppress(OSError):
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", (_PROC / "version").read_text(errors="replace"))
        return found[1] if found else None
    return None


def _driver_gpus() -> dict[str, int]:
    """Return the GPUs of the node by model, as its driver lists them."""
    models: Counter[str] = Counter()
    with suppress(OSError):
        for path in _PROC.glob("gpus/*/information"):
            found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.MULTILINE)
            models.update([found[1]] if found else [])
    return dict(models)


def _world_size() -> int | None:
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())
