"""What each rank of `trainer.py` runs: one part of it. Rank 0 prints what it measured, one JSON object a line."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import datasvc.trainer as hvd
from datasvc.trainer.engine.execution.transport import GroupTransport
from datasvc.trainer.engine.negotiation.messages import CycleMessage, decode_message, encode_message
from datasvc.trainer.engine.negotiation.negotiation import Negotiation
from datasvc.trainer.engine.negotiation.request_cache import RequestCache
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, Request
from datasvc.trainer.recipes.models import build_model

BATCH, SIDE, CLASSES = 32, 32, 1000
WARM_UP_STEPS = 2
LEARNING_RATE = 1e-3
NUM_CYCLES = 500
REQUESTS_PER_CYCLE = 16  # some ten cycles a step for 161 gradients

FUSED, UNFUSED = hvd.EngineSettings(), hvd.EngineSettings(fusion_bytes=0)
Step = Callable[[], None]
Wrap = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


class SummedParameters(nn.Module):
    """Parameters of given shapes; `forward` returns their sum, so a gradient costs one write."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self) -> Tensor:
        """Return the sum of all elements."""
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum()


def make_resnet18_step(wrap: Wrap, device: str = "cpu") -> Step:
    """Return a step of ResNet-18 on images that stay the same."""
    torch.manual_seed(0)
    model, optimizer = wrap(build_model("resnet18", CLASSES).to(device))
    images, labels = torch.randn(BATCH, 3, SIDE, SIDE).to(device), torch.randint(CLASSES, (BATCH,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def make_sizes_step(wrap: Wrap, device: str = "cpu") -> Step:
    """Return a step of ResNet-50's parameters without its work."""
    shapes = [tuple(parameter.shape) for parameter in build_model("resnet50", CLASSES).parameters()]
    model, optimizer = wrap(SummedParameters(shapes).to(device))

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return step


WORKLOADS = {"ResNet-18, 32x32": make_resnet18_step, "161 tensors of ResNet-50's sizes": make_sizes_step}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(module.parameters(), LEARNING_RATE)


def ours(**options: Any) -> Wrap:
    """Return how to train a module by `DistributedOptimizer`."""
    return lambda module: (module, hvd.DistributedOptimizer(sgd(module), module.named_parameters(), **options))


def by_ddp(**options: Any) -> Wrap:
    """Return how to train a module by torch's DistributedDataParallel."""
    return lambda module: (DistributedDataParallel(module, **options), sgd(module))


# How to train, and with which engine; None is without.
WAYS: dict[str, tuple[Wrap, hvd.EngineSettings | None]] = {
    "ours": (ours(), FUSED),
    "DDP": (by_ddp(), None),
    "DDP, views": (by_ddp(gradient_as_bucket_view=True), None),
    "ours, not fused": (ours(), UNFUSED),
    "alone": (lambda module: (module, sgd(module)), None),
}


def say(**values: Any) -> None:
    """Print from rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(values), flush=True)


def time_block(
    step: Step, num_steps: int, settings: hvd.EngineSettings | None, wait: Step = lambda: None
) -> tuple[float, float]:
    """Return milliseconds per step of the slower rank: by the clock, and of processor time in all its threads.

    `wait` returns once the device has done its work.

    Every rank calls this in the same order.
    """
    if settings is not None:
        hvd.init(settings=settings)
    for _ in range(WARM_UP_STEPS):
        step()
    wait()
    dist.barrier()
    started = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
    for _ in range(num_steps):
        step()
    wait()
    ended = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
    elapsed_ms = 1e3 * (ended - started) / num_steps
    dist.all_reduce(elapsed_ms, dist.ReduceOp.MAX)
    hvd.shutdown()
    return float(elapsed_ms[0]), float(elapsed_ms[1])


def make_step(make: Callable[[Wrap, str], Step], way: str, device: str = "cpu") -> Step:
    """Return a step of a way to train, with a model of its own."""
    wrap, settings = WAYS[way]
    if settings is not None:
        hvd.init(settings=settings)
    step = make(wrap, device)
    hvd.shutdown()
    return step


def compare(ways: list[str], repeats: int, seconds: float, device: str, workloads: Sequence[str]) -> None:
    """Time blocks of all ways to train, in turn, each as long as asked for."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for workload in workloads:
        steps = {way: make_step(WORKLOADS[workload], way, device) for way in ways}
        first_ms, _ = time_block(steps["alone"], 2, None, wait)
        num_steps = max(3, round(seconds * 1e3 / first_ms / 2))
        for repeat in range(repeats):
            for way in ways if repeat % 2 == 0 else list(reversed(ways)):
                ms, processor_ms = time_block(steps[way], num_steps, WAYS[way][1], wait)
                say(workload=workload, way=way, ms=ms, processor_ms=processor_ms, number=repeat, of=repeats)


def negotiate(repeats: int) -> None:
    """Time what negotiation is made of: the bare collective, a cycle, and a barrier with its wake-ups, in turn."""
    transport = GroupTransport(FUSED, gpu="", local_size=dist.get_world_size())
    cycle = make_cycle(transport)
    for repeat in range(repeats + 1):
        hvd.init()
        ways = {
            "bare exchange": lambda: transport.exchange(b""),
            "a cycle": cycle,
            "a barrier": hvd.barrier,
        }
        for way, run in ways.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(NUM_CYCLES):
                run()
            ms = 1e3 * (time.perf_counter() - started) / NUM_CYCLES
            if repeat:
                say(workload="negotiation", way=way, ms=ms, number=repeat, of=repeats)
        hvd.shutdown()
    transport.close()


def make_cycle(transport: GroupTransport) -> Step:
    """Return what the engine's thread does in a cycle until it knows what may run, for requests seen before."""
    cache, negotiation = RequestCache(FUSED.cache_capacity), Negotiation(transport.size)
    requests = [
        Request(
            name=f"gradient.{number}", kind=CollectiveKind.ALLREDUCE, dtypes=("float32",), shapes=((512, 512, 3, 3),)
        )
        for number in range(REQUESTS_PER_CYCLE)
    ]
    for request in requests:
        cache.remember(request)

    def cycle() -> None:
        numbers = [cache.find(request) for request in requests]
        message = CycleMessage(tuple(number for number in numbers if number is not None))
        messages = [decode_message(data) for data in transport.exchange(encode_message(message))]
        submitted = [
            [cache.resolve(entry) for entry in message.entries if isinstance(entry, int)] for message in messages
        ]
        ready = negotiation.advance(submitted)
        assert len(ready) == len(requests), ready

    return cycle


def count_bytes(repeats: int, num_steps: int = 3) -> None:
    """Count what passes through the loopback, where nothing else may run, while the ranks train."""
    for way, compression in (("none", hvd.Compression.none), ("bf16", hvd.Compression.bf16)):
        hvd.init()
        step = make_sizes_step(ours(compression=compression))
        step()
        for repeat in range(repeats):
            dist.barrier()
            before = loopback_bytes()
            for _ in range(num_steps):
                step()
            dist.barrier()
            sent_mb = (loopback_bytes() - before) / num_steps / 1e6
            say(workload="wire", way=way, mb=sent_mb, number=repeat, of=repeats)
        hvd.shutdown()


def loopback_bytes() -> int:
    """Return the bytes sent over the loopback so far, with all headers, in this network namespace."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise OSError("there is no loopback in /proc/net/dev")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("compare", "alone", "negotiation", "wire"))
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--workload", choices=list(WORKLOADS), help="of `compare` and `alone`; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of `compare` and `alone`")
    arguments = parser.parse_args()
    workloads = [arguments.workload] if arguments.workload else list(WORKLOADS)
    dist.init_process_group("gloo")  # ours uses it too, and leaves it standing
    match arguments.part:
        case "compare":
            compare(list(WAYS), arguments.repeats, arguments.seconds, arguments.device, workloads)
        case "alone":
            compare(["ours", "alone"], arguments.repeats, arguments.seconds, arguments.device, workloads)
        case "negotiation":
            negotiate(arguments.repeats)
        case "wire":
            count_bytes(arguments.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
