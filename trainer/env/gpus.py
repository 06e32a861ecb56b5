"""Finds the GPU that a rank uses, so that ranks that share a GPU can be detected."""

from __future__ import annotations

import torch
import torch.distributed as dist

from datasvc.trainer.env.environment import RankPlacement


def find_gpu_uuid(placement: RankPlacement) -> str:
    """Return the UUID of the GPU for this rank. Two ranks with the same UUID share a GPU.

    The UUID is "" without GPUs or NCCL: then the ranks communicate over Gloo only.
    """
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return ""
    # A launcher exposes to each rank either all GPUs of the node, or one GPU.
    has_all_gpus = torch.cuda.device_count() >= placement.local_size
    number = placement.local_rank if has_all_gpus else torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(number).uuid)
