"""What each rank of the stage `ranks` runs: every operation against what it must give, a training, and times.

    python -P -m datasvc.trainer.launch -np 2 python -P tools/gpu_stages/rank_checks.py --device cuda

Rank 0 prints one JSON object. A single rank would have no network; it gets one of torch.distributed here, so that its
tensors go through NCCL where they lie on a GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import datasvc.trainer as hvd
from datasvc.trainer.engine.execution.transport import GroupTransport
from datasvc.trainer.env.environment import EngineSettings, RankPlacement, read_placement
from datasvc.trainer.job import runtime
from gpu_stages.stage import synchronize

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8)
WARM_UPS = 3


def connect_one_rank(device: str) -> None:
    """Give a job of one rank a transport over torch.distributed; it would have none."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=dt.timedelta(seconds=60))

    def connect(place: RankPlacement, settings: EngineSettings) -> tuple[GroupTransport, bool]:
        gpu = "the only one" if device == "cuda" else ""
        return GroupTransport(settings, gpu=gpu, local_size=place.local_size), True

    runtime._connect = connect  # noqa: SLF001 - the only way for a single rank to use a network


def check_operations(device: str) -> int:
    """Compare every operation, and dtype of the reductions, with what it must give; returns how many were."""
    rank, size = hvd.rank(), hvd.size()
    count = 0
    for dtype in DTYPES:
        ones = torch.ones(5, 3, device=device).to(dtype)
        expect(hvd.allreduce(ones * (rank + 1), op=hvd.Sum), ones * sum(range(1, size + 1)))
        expect(hvd.broadcast(ones * (rank + 1), size - 1), ones * size)
        expect(hvd.allgather(ones[: rank + 1]), ones[:1].expand(sum(range(1, size + 1)), 3))
        count += 3
    numbers = torch.arange(2.0 * size, device=device)
    expect(hvd.allreduce(numbers + rank), numbers + (size - 1) / 2)
    received, splits = hvd.alltoall(numbers, torch.full((size,), 2, dtype=torch.int32))
    expect(received, torch.tensor([2.0 * rank, 2.0 * rank + 1] * size, device=device))
    expect(splits.cpu(), torch.full((size,), 2, dtype=splits.dtype))
    expect(hvd.reducescatter(numbers, op=hvd.Sum), size * numbers[2 * rank : 2 * rank + 2])
    expect(hvd.grouped_allreduce([numbers, numbers.t()], op=hvd.Max)[1], numbers)
    halved = hvd.allreduce(numbers, compression=hvd.Compression.fp16)
    expect(halved, numbers)
    return count + 6


def expect(found: Tensor, expected: Tensor) -> None:
    """Compare values, dtype and device."""
    torch.testing.assert_close(found, expected)


def check_training(device: str) -> float:
    """Train with a wrapped optimizer, 16-bit compression and batch statistics of all ranks; returns the last loss.

    Every rank ends with the same weights, which are those that rank 0 began with, trained.
    """
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).to(device)
    images, labels = torch.randn(8, 3, 6, 6, device=device), torch.randint(2, (8,), device=device)
    model(images)  # the lazy layer takes its shape
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.Compression.fp16)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    scale = torch.amp.GradScaler(device, enabled=device == "cuda")
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        scale.scale(loss).backward()
        optimizer.synchronize()
        scale.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scale.step(optimizer)
        scale.update()
        losses.append(float(loss.detach()))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for other in hvd.allgather(weights[None]):
        torch.testing.assert_close(other, weights, rtol=0, atol=0)
    assert losses[-1] < losses[0], losses
    return losses[-1]


def time_operation(run: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Return the milliseconds of each call, until its result can be used."""
    times_ms = []
    for repeat in range(repeats + WARM_UPS):
        hvd.barrier()
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        if repeat >= WARM_UPS:
            times_ms.append(1e3 * (time.perf_counter() - began))
    return times_ms


def main() -> None:
    """Check, train and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--numbers", type=int, default=25_600_000, help="float32, of the large all-reduce")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    if read_placement(os.environ).size == 1:
        connect_one_rank(arguments.device)
    hvd.init()
    num_checks, loss = check_operations(arguments.device), check_training(arguments.device)
    small, large = (torch.ones(count, device=arguments.device) for count in (256, arguments.numbers))
    times_ms = {
        "all-reduce of 1 kB": time_operation(lambda: hvd.allreduce_(small), arguments.device, arguments.repeats),
        f"all-reduce of {large.nbytes / 1e6:.3g} MB": time_operation(
            lambda: hvd.allreduce_(large), arguments.device, arguments.repeats
        ),
    }
    if hvd.rank() == 0:
        print(json.dumps({"num_checks": num_checks, "loss": loss, "times_ms": times_ms}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
