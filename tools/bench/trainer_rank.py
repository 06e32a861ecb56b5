"""What each rank of `trainer.py` runs: blocks of steps, one way of training after the other.

Rank 0 prints one JSON object a line for every block: milliseconds per step of the slower rank.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainer as hvd
from trainer.recipes.models import small_cnn

BATCH, SIDE, CLASSES = 32, 64, 10
WARM_UP_STEPS = 3
LEARNING_RATE = 1e-3

Step = Callable[[], None]


class SummedParameters(nn.Module):
    """Parameters of given shapes; `forward` returns their sum, so a gradient costs one write."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self) -> Tensor:
        """Return the sum of all elements."""
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum()


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters, in order (He et al. 2016, with 1,000 classes)."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]  # with its normalisation's scale and shift
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def make_small_step(wrap: Callable[[nn.Module], nn.Module], *, is_ours: bool) -> Step:
    """Return a step of the recipe's CNN on images that stay the same."""
    torch.manual_seed(0)
    module = small_cnn(CLASSES)
    model, optimizer = wrap(module), make_optimizer(module, is_ours=is_ours)
    images, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def make_large_step(wrap: Callable[[nn.Module], nn.Module], *, is_ours: bool) -> Step:
    """Return a step of ResNet-50's parameters."""
    module = SummedParameters(resnet50_shapes())
    model, optimizer = wrap(module), make_optimizer(module, is_ours=is_ours)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return step


def make_optimizer(module: nn.Module, *, is_ours: bool) -> torch.optim.Optimizer:
    """Return plain SGD, distributed by us or not."""
    optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE)
    return hvd.DistributedOptimizer(optimizer, module.named_parameters()) if is_ours else optimizer


def make_ways(make_step: Callable[..., Step]) -> dict[str, Step]:
    """Return a step of each way to train, with a model of its own."""
    return {
        "ours": make_step(lambda module: module, is_ours=True),
        "DDP": make_step(DistributedDataParallel, is_ours=False),
        "DDP, views": make_step(
            lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True), is_ours=False
        ),
        "alone": make_step(lambda module: module, is_ours=False),
    }


def time_block(step: Step, num_steps: int) -> float:
    """Return milliseconds per step of the slower rank. Every rank calls this in the same order."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    elapsed_ms = torch.tensor(1e3 * (time.perf_counter() - started) / num_steps)
    dist.all_reduce(elapsed_ms, dist.ReduceOp.MAX)
    return float(elapsed_ms)


def main() -> None:
    """Run all blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--steps-small", type=int, required=True)
    parser.add_argument("--steps-large", type=int, required=True)
    arguments = parser.parse_args()
    hvd.init()  # makes torch's default process group, which DDP uses too
    for workload, make_step, num_steps in (
        ("small CNN", make_small_step, arguments.steps_small),
        ("ResNet-50's sizes", make_large_step, arguments.steps_large),
    ):
        ways = make_ways(make_step)
        for step in ways.values():
            time_block(step, WARM_UP_STEPS)
        for repeat in range(arguments.repeats):
            names = list(ways) if repeat % 2 == 0 else list(reversed(ways))
            for name in names:
                ms = time_block(ways[name], num_steps)
                if hvd.rank() == 0:
                    block = {"workload": workload, "way": name, "ms": ms}
                    print(json.dumps(block | {"number": repeat, "of": arguments.repeats}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
