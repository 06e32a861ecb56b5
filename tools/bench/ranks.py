"""What the ranks of a benchmark share: time of the slowest one, and figures that rank 0 prints as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Step = Callable[[], object]


def time_block(step: Step, num_steps: int, wait: Step = lambda: None) -> tuple[float, float]:
    """Return the seconds of a step on the slowest rank: by the clock, and of the processor in all its threads.

    Every rank calls this in the same order. `wait` returns once the device has done its work.
    """
    wait()
    dist.barrier()
    began = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
    for _ in range(num_steps):
        step()
    wait()
    ended = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
    elapsed_s = (ended - began) / num_steps
    dist.all_reduce(elapsed_s, dist.ReduceOp.MAX)
    return float(elapsed_s[0]), float(elapsed_s[1])


def say(**values: Any) -> None:
    """Print from rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(values), flush=True)
