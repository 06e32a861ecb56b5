"""Which GPU is a rank's own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from datasvc.trainer.env.environment import RankPlacement


def name_own_gpu(place: RankPlacement) -> str:
    """What names the GPU that this rank may use alone, if no other rank has the same name; empty without.

    A launcher either shows all GPUs of a node to each of its ranks, which share them out by their local rank, or
    shows each rank one.
    """
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return ""
    number = place.local_rank if torch.cuda.device_count() >= place.local_size else torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(number).uuid)
