"""What each rank of the stage `layouts` runs: one rank with recomputation and offloading, or two of a pipeline.

    python -P tools/gpu_stages/layout_checks.py --device cuda
    python -P -m datasvc.trainer.launch -np 2 python -P tools/gpu_stages/layout_checks.py --device cuda

Rank 0 prints one JSON object. Every way must have the losses of a model that is not divided.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout
from datasvc.trainer.env.environment import read_placement
from datasvc.trainer.recipes.layouts.divided_model import LayoutOptions, apply_layout
from datasvc.trainer.recipes.layouts.shard import recompute_activations, shard_parameters
from datasvc.trainer.recipes.models.gpt import GPT

VOCABULARY, BATCH, NUM_STEPS, RATE = 512, 4, 3, 1e-3
WAYS = ("whole", "recompute", "offload")


def build_model(arguments: argparse.Namespace) -> GPT:
    """Return the model, with the same weights in every call."""
    torch.manual_seed(0)
    return GPT(VOCABULARY, context=arguments.block, layers=4, heads=4, width=arguments.width, dropout=0.0)


def draw(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a batch, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2, BATCH, arguments.block), generator=generator)
    return tokens[0].to(arguments.device), tokens[1].to(arguments.device)


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum over a batch, or a part of one, of the losses, divided by the tokens of the batch."""
    num_tokens = BATCH * targets.shape[1]
    return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum") / num_tokens


def train(arguments: argparse.Namespace, way: str) -> tuple[list[float], int]:
    """Return the losses of some steps, and the peak of the memory of the GPU, on one rank."""
    gc.collect()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = build_model(arguments)
    if way == "recompute":
        recompute_activations(model)
    if way == "offload":
        mesh = init_device_mesh(arguments.device, (1,), mesh_dim_names=("shard",))
        shard_parameters(model, mesh, reshard_after_forward=True, offload=True)
    else:
        model.to(arguments.device)
    inputs, targets = draw(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def compute() -> float:
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        return float(loss.detach())

    losses = take_steps(optimizer, compute)
    return losses, torch.cuda.max_memory_allocated() if arguments.device == "cuda" else 0


def train_pipeline(arguments: argparse.Namespace) -> list[float]:
    """Return the losses of two ranks of a pipeline. Both call this."""
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    divided = apply_layout(
        build_model(arguments),
        Layout(pipeline=2),
        LayoutOptions(),
        rank=hvd.rank(),
        device=device,
        num_micro_batches=BATCH,
    )
    inputs, targets = draw(arguments)
    optimizer = torch.optim.AdamW(divided.model.parameters(), lr=RATE)

    def compute() -> float:
        assert divided.pipeline is not None
        total = divided.pipeline.step(inputs, targets, {}, mean_loss)
        divided.sum_gradients()
        return float(divided.sum_over_copies(total))

    return take_steps(optimizer, compute)


def take_steps(optimizer: torch.optim.Optimizer, compute: Callable[[], float]) -> list[float]:
    """Take some steps with the gradients that `compute` leaves; return the losses."""
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(compute())
        optimizer.step()
    return losses


def main() -> None:
    """Train in each way, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--block", type=int, default=1024)
    arguments = parser.parse_args()
    expected, whole_bytes = train(arguments, "whole")
    peaks = {"whole": whole_bytes}
    if read_placement(os.environ).size == 1:
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=dt.timedelta(seconds=60)
        )
        for way in WAYS[1:]:
            losses, peaks[way] = train(arguments, way)
            torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3, msg=f"{way}: {losses}, not {expected}")
        dist.destroy_process_group()
        print(json.dumps({"losses": expected, "peak_bytes": peaks}), flush=True)
        return
    hvd.init()
    losses = train_pipeline(arguments)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3, msg=f"pipeline: {losses}, not {expected}")
    if hvd.rank() == 0:
        print(json.dumps({"losses": losses}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
