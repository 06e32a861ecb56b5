"""What each rank of `buckets.py` runs. Rank 0 prints the time of each block, one JSON object a line."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import datasvc.trainer as hvd
from datasvc.trainer.recipes.models import build_model

AUTO, MAX_STEPS_TO_CHOOSE = "auto", 20


class _Layer(torch.autograd.Function):
    """The identity of `x`, with a gradient of the weight after some time in which the processor is free."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backward_s: float) -> Tensor:
        ctx.shape, ctx.backward_s = weight.shape, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]  # as torch's own
        time.sleep(ctx.backward_s)
        return gradient, torch.zeros(ctx.shape), None


class Training:
    """Parameters of a model's shapes, and a step with one size of buckets, whose backward pass takes a given time."""

    def __init__(self, backward_s: float, bucket_bytes: Any) -> None:
        shapes = [parameter.shape for parameter in build_model("resnet18", 1000).parameters()]
        self._weights = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        # A convolution takes about as long as another; its normalization next to nothing.
        num_large = sum(len(shape) > 1 for shape in shapes)
        self._seconds = [backward_s / num_large if len(shape) > 1 else 0.0 for shape in shapes]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self._weights, 1e-3), bucket_bytes=bucket_bytes)

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        x = torch.zeros(1, requires_grad=True)
        for weight, backward_s in zip(self._weights, self._seconds, strict=True):
            x = _Layer.apply(x, weight, backward_s)
        x.sum().backward()
        self.optimizer.step()


def time_block(training: Training, num_steps: int) -> float:
    """Return the seconds of a step on the slower rank; every rank calls this in the same order."""
    training.step()  # warm-up
    dist.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        training.step()
    elapsed_s = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(elapsed_s, dist.ReduceOp.MAX)
    return float(elapsed_s) / num_steps


def main() -> None:
    """Time all blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--backward-ms", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--grid", type=float, nargs="+", required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")  # the engine uses it too, and leaves it standing
    hvd.init()
    sizes = {f"{mib:g} MiB": int(mib * 2**20) for mib in arguments.grid}
    trainings = {name: Training(arguments.backward_ms / 1e3, size) for name, size in {AUTO: AUTO, **sizes}.items()}
    chosen = trainings[AUTO].optimizer
    for _ in range(MAX_STEPS_TO_CHOOSE):
        if chosen.is_choosing_buckets:
            trainings[AUTO].step()
    cost = chosen.all_reduce_cost
    say(
        note=f"auto: {chosen.bucket_bytes / 2**20:.2f} MiB; an all-reduce takes {cost.alpha_s * 1e3:.2f} ms + "
        f"{cost.beta_s * 1e9:.2f} ms per MB"
    )
    for repeat in range(arguments.repeats):
        for name in list(trainings) if repeat % 2 == 0 else reversed(list(trainings)):
            say(size=name, s=time_block(trainings[name], arguments.steps))
    hvd.shutdown()
    dist.destroy_process_group()


def say(**values: Any) -> None:
    """Print from rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
