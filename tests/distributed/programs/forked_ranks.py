"""Ranks as forks of one process that has loaded torch: starting them costs next to nothing."""

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch._dynamo  # DTensor loads it at first use, half a second on every rank
import torch.distributed as dist

from datasvc.child_process import end_with_parent


def run_ranks(num_ranks, work, *, failing=()):
    """Call `work` on every rank of a job of its own; ends the program unless it fails on the ranks that should."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_rank, args=(work, rank, num_ranks, f"file://{folder}/store"))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed != list(failing):
        sys.exit(f"FAILED: ranks {failed} of {num_ranks}")


def _run_rank(work, rank, num_ranks, store):
    end_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    work()
    dist.destroy_process_group()
