"""What the ranks of a benchmark share: time of the slowest one, figures of rank 0 as JSON, a network of their own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A network namespace, whose loopback is down at first.
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]

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


def has_own_network() -> bool:
    """Return whether this system gives a network namespace; without, others' traffic is counted too."""
    try:
        return subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def loopback_bytes() -> int:
    """Return the bytes sent over the loopback so far, with all headers, in this network namespace."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise OSError("there is no loopback in /proc/net/dev")
