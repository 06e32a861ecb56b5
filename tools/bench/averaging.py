"""Weights averaged every few steps beside gradients in every step: two nodes over a slow link."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import datasvc.trainer as hvd
from datasvc.printable import count_text
from datasvc.trainer.recipes.models import build_model
from tools.bench.ranks import say, time_block
from tools.bench.runner import Options, Report, bench, turns
from tools.bench.slow_link import delayed_nodes, run_on_nodes

BSP = "bsp"
WAYS = (
    BSP,
    "local:4",
    "local:16",
    "diloco:16",
    "diloco:16:fragments=4,delay=2",
    "diloco:16:fragments=4,delay=2,codec=int8",
)


@bench(
    repeats=3,
    mbit=(1000, "of the link"),
    delay_ms=(20.0, "of the link, in each direction"),
    compute_ms=(50.0, "of a step"),
    steps=(32, "of a block, a multiple of 16"),
    ranks=(1, "of each node"),
)
def averaging(options: Options) -> Report:
    """Steps per second and bytes per step of averaged weights beside averaged gradients, over a slow link.

    The nodes are network namespaces, with one rank each unless told otherwise. A model has parameters of ResNet-18's
    sizes (47 MB); a step sleeps for the time of its computation, so the processor is free, as if a GPU computed. In
    every round, in alternating order: a block of steps of each way, by the time of the slowest rank; the bytes are
    those that the link has carried from the node of rank 0, with all headers. Ratios are within each round.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    num_bytes: dict[str, list[float]] = defaultdict(list)
    with delayed_nodes(options.mbit * 1e6 / 8, options.delay_ms / 1e3) as nodes:
        for block in run_on_nodes(
            nodes, options.ranks, time_ways, options.repeats, options.compute_ms / 1e3, options.steps
        ):
            seconds[block["way"]].append(block["s"])
            num_bytes[block["way"]].append(block["bytes"])
    nodes_text = f"2 nodes of {count_text(options.ranks, 'rank')}"
    link_text = f"{options.mbit} Mbit/s, {options.delay_ms:g} ms"
    report = Report(f"{nodes_text}, {link_text}, {options.compute_ms:g} ms a step")
    report.add_rows("steps/s", seconds, lambda value: 1 / value)
    report.add_rows("MB/step", num_bytes, lambda value: value / 1e6)
    for way in WAYS[1:]:
        report.add_ratio(f"bytes: {BSP} / {way}", num_bytes[BSP], num_bytes[way])
        report.add_ratio(f"steps/s: {way} / {BSP}", seconds[BSP], seconds[way])
    return report


def time_ways(repeats: int, compute_s: float, num_steps: int) -> None:
    """Be a rank of `averaging`; rank 0 prints the time of a step, and the bytes that it has sent for it."""
    dist.init_process_group("gloo")  # the engine uses it too, and leaves it standing
    hvd.init()
    steps = {way: _make_step(way, compute_s) for way in WAYS}
    for _, way in turns(WAYS, repeats):
        before = _sent_bytes()
        elapsed_s, _ = time_block(steps[way], num_steps)
        say(way=way, s=elapsed_s, bytes=(_sent_bytes() - before) / num_steps)
    hvd.shutdown()
    dist.destroy_process_group()


def _make_step(way: str, compute_s: float) -> Any:
    shapes = [parameter.shape for parameter in build_model("resnet18", 1000).parameters()]
    weights = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    plain = torch.optim.SGD(weights, 1e-3)
    optimizer = hvd.DistributedOptimizer(plain) if way == BSP else hvd.Averaging(plain, way)

    def step() -> None:
        optimizer.zero_grad()
        time.sleep(compute_s)
        torch.autograd.backward([weight.sum() for weight in weights])
        optimizer.step()

    return step


def _sent_bytes() -> int:
    # Of this network namespace, which /sys need not show.
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() == "eth0")
