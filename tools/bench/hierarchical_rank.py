"""What each rank of `hierarchical.py` runs. Rank 0 prints the time of each block, one JSON object a line."""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist

import datasvc.trainer as hvd

WAYS = {
    "flat": hvd.EngineSettings(),
    "hierarchical": hvd.EngineSettings(hierarchical_allreduce=True),
    "inside": hvd.EngineSettings(),
}
NUM_REDUCTIONS = 4


def time_block(way: str, num_elements: int) -> float:
    """Return the seconds of an all-reduce on the slowest rank; every rank calls this in the same order."""
    per_node = hvd.local_size()
    tensor = torch.zeros(num_elements)
    process_set = hvd.global_process_set
    if way == "inside":
        sets = [hvd.add_process_set(range(first, first + per_node)) for first in range(0, hvd.size(), per_node)]
        process_set = sets[hvd.rank() // per_node]
    hvd.allreduce_(tensor, op=hvd.Sum, process_set=process_set)  # warm-up
    dist.barrier()
    began = time.perf_counter()
    for _ in range(NUM_REDUCTIONS):
        hvd.allreduce_(tensor, op=hvd.Sum, process_set=process_set)
    elapsed_s = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(elapsed_s, dist.ReduceOp.MAX)
    if way == "inside":
        for each in sets:
            hvd.remove_process_set(each)
    return float(elapsed_s) / NUM_REDUCTIONS


def main() -> None:
    """Time all blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")  # the engine uses it too, and leaves it standing
    for repeat in range(arguments.repeats):
        for way in list(WAYS) if repeat % 2 == 0 else reversed(list(WAYS)):
            hvd.init(settings=WAYS[way])
            lengths = [size * 250_000 for size in arguments.sizes] + ([1] if way == "inside" else [])
            for num_elements in lengths:
                seconds = time_block(way, num_elements)
                if dist.get_rank() == 0:
                    print(json.dumps({"way": way, "bytes": num_elements * 4, "s": seconds}), flush=True)
            hvd.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
