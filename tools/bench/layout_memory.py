"""Bytes of a rank at several layouts."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import datasvc.trainer as hvd
from datasvc.planning.candidates import Candidate
from datasvc.planning.memory import estimate_memory, state_bytes
from datasvc.trainer.recipes.build import build_learner
from datasvc.trainer.recipes.choose_layout import choose_layout
from datasvc.trainer.recipes.layouts.optimizer import LayoutOptimizer
from datasvc.trainer.recipes.layouts.shard import to_local
from datasvc.trainer.recipes.planning.count_costs import count_costs
from datasvc.trainer.recipes.settings.config import TrainConfig, plan_batches
from datasvc.trainer.recipes.start import choose_place
from datasvc.trainer.recipes.tasks.language import LanguageModelling
from datasvc.trainer.recipes.tasks.task import Examples
from datasvc.trainer.recipes.update import Learner, update
from tools.bench.ranks import say
from tools.bench.runner import Options, Report, bench, run_ranks

VOCABULARY, NUM_STEPS = 2048, 2
NUM_RANKS = 4
WHOLE = "data=4"
LAYOUTS = (
    "shard=4:1",
    "shard=4:2",
    "shard=4:3",
    "data=2,shard=2:1",
    "data=2,shard=2:2",
    "data=2,shard=2:3",
    "tensor=4",
    "pipeline=4",
    "context=4",
    "shard=2,tensor=2:3",
    "shard=2,pipeline=2:3",
    "tensor=2,pipeline=2",
)
# glibc raises these by itself, and then keeps what FSDP frees: the peak would be that of the allocator.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
_STATES = ("parameters", "gradients", "optimizer")


@bench(
    repeats=3,
    positional={"layouts": {"nargs": "*", "default": LAYOUTS, "metavar": "LAYOUT", "help": "default: twelve"}},
    layers=8,
    width=256,
    tokens=(64, "of a block"),
)
def layout_memory(options: Options) -> Report:
    """Bytes of a rank at several layouts: parameters, gradients, optimizer state, and the peak of resident memory.

    A GPT with AdamW on four gloo ranks. Bytes of tensors are counted after a step, on the rank that has most; the
    peak is that of two steps, above the resident memory before the model was built. Each is compared with `data=4`,
    in which every rank has everything (Nichols et al. saw ZeRO at 42 to 66 % of its memory), and with what `plan`
    estimates. None of this depends on the load of the machine.

    A LAYOUT may end with a ZeRO stage: shard=4:2.
    """
    sizes = {"layers": options.layers, "width": options.width, "tokens": options.tokens}
    layouts = [WHOLE, *options.layouts]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in run_ranks(measure_layouts, NUM_RANKS, options.repeats, layouts, sizes, **_MALLOC):
        layout = line.pop("layout")
        for kind, size_bytes in line.items():
            found[layout][kind].append(size_bytes)
    report = Report("Memory of a rank by layout", "estimated: by `datasvc plan layouts`")

    def states(layout: str, prefix: str = "") -> list[float]:
        kinds = [found[layout][f"{prefix}{kind}"] for kind in _STATES]
        return [sum(sizes) for sizes in zip(*kinds, strict=True)]

    for layout, sizes in found.items():
        for kind in (*_STATES, "peak"):
            report.add_row(f"{layout} {kind}", "MB", [size_bytes / 1e6 for size_bytes in sizes[kind]])
        report.add_ratio(f"{layout} states / {WHOLE}", states(layout), states(WHOLE))
        report.add_ratio(f"{layout} peak / {WHOLE}", sizes["peak"], found[WHOLE]["peak"])
        report.add_ratio(f"{layout} states, estimated / measured", states(layout, "estimated_"), states(layout))
        report.add_ratio(f"{layout} peak, estimated / measured", sizes["estimated_peak"], sizes["peak"])
    return report


def measure_layouts(repeats: int, layouts: list[str], sizes: Mapping[str, int]) -> None:
    """Be a rank; rank 0 prints the bytes of each layout."""
    torch.set_num_threads(1)
    hvd.init()
    measure(layouts[0], sizes)  # the first run loads libraries and connects the ranks
    for _ in range(repeats):
        for layout in layouts:
            found = measure(layout, sizes)
            say(layout=layout, **found)
    hvd.shutdown()


class Blocks(LanguageModelling):
    """Language modelling of batches that are examples already."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._vocabulary = config, VOCABULARY

    def unpack(self, batch: Any, device: torch.device) -> Examples:  # noqa: ARG002 - the signature of a task
        """Return the batch."""
        examples: Examples = batch
        return examples


def measure(named: str, sizes: Mapping[str, int]) -> dict[str, int | float]:
    """Return bytes of the rank that has most of each kind, and estimated ones. Every rank calls this alike."""
    layout_text, _, zero = named.partition(":")
    block, batch_size = sizes["tokens"], 2 * hvd.size()
    options = {"layers": sizes["layers"], "heads": 8, "width": sizes["width"], "context": block, "dropout": 0.0}
    config = TrainConfig(
        data="tokens@1",
        repo="unused",
        name="unused",
        model="gpt",
        model_option=tuple(f"{name}={value}" for name, value in options.items()),
        vocabulary=VOCABULARY,
        global_batch=batch_size,
        micro_batch=2,
        optimizer="adamw",
        layout=layout_text,
        zero=int(zero) if zero else None,
    )
    layout = choose_layout(config, hvd.size(), block=block)
    batches, place = plan_batches(config, layout.num_data_ranks), choose_place(config, layout)
    free_memory()
    before = read_memory("VmRSS")
    learner = build_learner(config, Blocks(config), batches, place, layout, block=block)
    free_memory()  # each rank builds the whole model first
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the peak back
    tokens = torch.randint(VOCABULARY, (2, batches.batch_size, block))
    examples = Examples(tokens[0], tokens[1], torch.ones(batches.batch_size, dtype=torch.bool))
    for _ in range(NUM_STEPS):
        update(learner, examples)
    peak = read_memory("VmHWM") - before
    own = {**state_of(learner), "peak": peak}
    most = [max(rank[name] for rank in hvd.allgather_object(own)) for name in own]
    is_sharded = layout.shard * layout.context > 1
    candidate = Candidate(
        layout, batches.micro_batch, batches.num_passes, zero=(config.zero or 3) if is_sharded else 0
    )
    estimated = estimate_memory(
        count_costs("gpt", VOCABULARY, options, tokens=block),
        candidate,
        state_bytes("adamw", "fp32"),
        precision="fp32",
    )
    estimates = {f"estimated_{name}": value for name, value in dataclasses.asdict(estimated).items()}
    return {**dict(zip(own, most, strict=True)), **estimates, "estimated_peak": estimated.total}


def state_of(learner: Learner) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on this rank."""
    # With ZeRO-1, every rank must call this.
    whole: dict[str, Any] = learner.optimizer.state_dict()
    is_divided = isinstance(learner.optimizer, LayoutOptimizer)
    states: Mapping[Any, Mapping[str, Any]] = learner.optimizer.states if is_divided else whole["state"]
    parameters = list(learner.model.parameters())
    return {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes(each.grad for each in parameters if each.grad is not None),
        "optimizer": local_bytes(value for state in states.values() for value in state.values()),
    }


def local_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the parts of tensors that are on this rank."""
    return sum(to_local(tensor).numel() * tensor.element_size() for tensor in tensors if torch.is_tensor(tensor))


def read_memory(name: str) -> int:
    """Return bytes of this process: "VmRSS" now, or "VmHWM" at most."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) << 10


def free_memory() -> None:
    """Give memory that is not used back to the operating system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
