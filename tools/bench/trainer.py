"""What DistributedOptimizer costs, beside torch's DistributedDataParallel and beside no communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import datasvc.trainer as hvd
from datasvc.trainer.recipes.models import build_model
from tools.bench.ranks import OWN_NETWORK, Step, has_own_network, loopback_bytes, say, time_block
from tools.bench.runner import Options, Report, bench, run_ranks, turns

OURS, UNFUSED, ALONE = "ours", "ours, not fused", "alone"
DDP = ("DDP", "DDP, views")
PROCESSOR = ", processor"

BATCH, SIDE, CLASSES = 32, 32, 1000
WARM_UP_STEPS = 2
LEARNING_RATE = 1e-3
FUSED, NOT_FUSED = hvd.EngineSettings(), hvd.EngineSettings(fusion_bytes=0)

Wrap = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]
# By workload and way, a figure of each round: milliseconds, or megabytes.
Values = dict[str, dict[str, list[float]]]


@bench(
    repeats=7,
    positional={"parts": {"nargs": "*", "metavar": "PART", "help": "compare, alone, wire; default: all"}},
    seconds=(2.0, "of a block"),
    workload={"help": "of `compare` and `alone`; default: both"},
)
def trainer(options: Options) -> Report:
    """What DistributedOptimizer costs, beside torch's DistributedDataParallel and beside no communication.

    One thread a rank, gloo over the loopback. Two workloads: ResNet-18 on 32 images of 32x32; and 161 tensors of
    ResNet-50's sizes (25.6 million fp32, 102 MB) with a loss that only sums them, so that a step is little but
    communication. Parts:

    - `compare`, two ranks: block of steps by block, in turn, in one pair of processes, by `ours`; by `ours, not
      fused` (HOROVOD_FUSION_THRESHOLD=0: each gradient travels alone); by `DDP`; by `DDP, views`, with
      `gradient_as_bucket_view`; and `alone`, each rank for itself. A block begins when all ranks are there and lasts
      until the slower one ends it. Our engine runs only in our blocks. Ratios are the other's time / ours: above 1,
      ours is the faster. "Processor" is what all threads of the slower rank used: it counts on a machine that is busy
      with other work, where the clock measures the others too, but not what a rank waits for.
    - `alone`, one rank: ours against the plain optimizer.
    - `wire`, two ranks in a network namespace of their own, if one can be had: bytes through its loopback per step,
      both directions, with all headers and what negotiation sends.
    """
    report = Report("one thread a rank, gloo over the loopback")
    for part in options.parts or PARTS:
        num_ranks, add = PARTS[part]
        values: Values = defaultdict(lambda: defaultdict(list))
        prefix = OWN_NETWORK if part == "wire" and has_own_network() else []
        workloads = [options.workload] if options.workload else list(WORKLOADS)
        measured = run_ranks(run_part, num_ranks, part, options.repeats, options.seconds, workloads, prefix=prefix)
        for line in measured:
            values[line["workload"]][line["way"]].append(line["mb" if "mb" in line else "ms"])
            if "processor_ms" in line:
                values[line["workload"] + PROCESSOR][line["way"]].append(line["processor_ms"])
        add(report, values)
    return report


def add_comparison(report: Report, values: Values) -> None:
    """Add steps per second, overheads and ratios of two ranks."""
    for workload, ways in values.items():
        for way, times_ms in ways.items():
            _add_times(report, f"{workload}: {way}", times_ms)
        for way in (*DDP, UNFUSED, ALONE):
            report.add_ratio(f"{workload}: time of {way} / {OURS}", ways[way], ways[OURS])


def add_one_rank(report: Report, values: Values) -> None:
    """Add what a wrapped optimizer costs where there is nobody to talk to."""
    for workload, ways in values.items():
        for way, times_ms in ways.items():
            _add_times(report, f"1 rank, {workload}: {way}", times_ms)
        report.add_ratio(f"1 rank, {workload}: time of {OURS} / {ALONE}", ways[OURS], ways[ALONE])


def _add_times(report: Report, name: str, times_ms: list[float]) -> None:
    if PROCESSOR in name:
        report.add_row(name, "ms/step", times_ms)
    else:
        report.add_row(name, "steps/s", [1e3 / ms for ms in times_ms])


def add_wire(report: Report, values: Values) -> None:
    """Add bytes of a step."""
    ways = values["wire"]
    for way, sent_mb in ways.items():
        report.add_row(f"through the loopback, compression {way}", "MB/step", sent_mb)
    report.add_ratio("bytes of bf16 / none", ways["bf16"], ways["none"])


PARTS = {
    "compare": (2, add_comparison),
    "alone": (1, add_one_rank),
    "wire": (2, add_wire),
}
"""By part, how many ranks it has, and what adds its figures."""


def run_part(part: str, repeats: int, seconds: float, workloads: list[str], device: str = "cpu") -> None:
    """Be a rank of a part; rank 0 prints what it measured. `workloads` and `device` are of `compare` and `alone`."""
    dist.init_process_group("gloo")  # ours uses it too, and leaves it standing
    match part:
        case "compare":
            compare(list(WAYS), repeats, seconds, device, workloads)
        case "alone":
            compare([OURS, ALONE], repeats, seconds, device, workloads)
        case "wire":
            count_bytes(repeats)
    dist.destroy_process_group()


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
    OURS: (ours(), FUSED),
    "DDP": (by_ddp(), None),
    "DDP, views": (by_ddp(gradient_as_bucket_view=True), None),
    UNFUSED: (ours(), NOT_FUSED),
    ALONE: (lambda module: (module, sgd(module)), None),
}


def time_steps(step: Step, num_steps: int, settings: hvd.EngineSettings | None, wait: Step) -> tuple[float, float]:
    """Return milliseconds per step of the slower rank: by the clock, and of the processor.

    Every rank calls this in the same order. The engine runs only here, if there are settings. `wait` returns once the
    device has done its work.
    """
    if settings is not None:
        hvd.init(settings=settings)
    for _ in range(WARM_UP_STEPS):
        step()
    elapsed_s, processor_s = time_block(step, num_steps, wait)
    hvd.shutdown()
    return 1e3 * elapsed_s, 1e3 * processor_s


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
        first_ms, _ = time_steps(steps[ALONE], 2, None, wait)
        num_steps = max(3, round(seconds * 1e3 / first_ms / 2))
        for _, way in turns(ways, repeats):
            ms, processor_ms = time_steps(steps[way], num_steps, WAYS[way][1], wait)
            say(workload=workload, way=way, ms=ms, processor_ms=processor_ms)


def count_bytes(repeats: int, num_steps: int = 3) -> None:
    """Count what passes through the loopback, where nothing else may run, while the ranks train."""
    for way, compression in (("none", hvd.Compression.none), ("bf16", hvd.Compression.bf16)):
        hvd.init()
        step = make_sizes_step(ours(compression=compression))
        step()
        for _ in range(repeats):
            dist.barrier()
            before = loopback_bytes()
            for _ in range(num_steps):
                step()
            dist.barrier()
            sent_mb = (loopback_bytes() - before) / num_steps / 1e6
            say(workload="wire", way=way, mb=sent_mb)
        hvd.shutdown()
