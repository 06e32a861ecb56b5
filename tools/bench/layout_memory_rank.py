"""What each rank of `layout_memory.py` runs. Rank 0 prints the bytes of each layout, one JSON object a line."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import datasvc.trainer as hvd
from datasvc.trainer.recipes.choose_layout import choose_layout
from datasvc.trainer.recipes.layouts.optimizer import LayoutOptimizer
from datasvc.trainer.recipes.layouts.parts import to_local
from datasvc.trainer.recipes.planning.candidate import Candidate
from datasvc.trainer.recipes.planning.count_costs import count_costs
from datasvc.trainer.recipes.planning.memory import estimate_memory, state_bytes
from datasvc.trainer.recipes.settings.batch_plan import plan_batches
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.start import build_learner, choose_place
from datasvc.trainer.recipes.tasks.language import LanguageModelling
from datasvc.trainer.recipes.tasks.task import Examples
from datasvc.trainer.recipes.update import Learner, update

VOCABULARY, NUM_STEPS = 2048, 2


class Blocks(LanguageModelling):
    """Language modelling of batches that are examples already."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._vocabulary = config, VOCABULARY

    def unpack(self, batch: Any, device: torch.device) -> Examples:  # noqa: ARG002 - the signature of a task
        """Return the batch."""
        examples: Examples = batch
        return examples


def measure(layout_text: str, zero: int | None, arguments: argparse.Namespace) -> dict[str, int | float]:
    """Return bytes of the rank that has most of each kind, and estimated ones. Every rank calls this alike."""
    block, batch_size = arguments.tokens, 2 * hvd.size()
    options = {"layers": arguments.layers, "heads": 8, "width": arguments.width, "context": block, "dropout": 0.0}
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
        zero=zero,
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


def main() -> None:
    """Measure the layouts."""
    parser = argparse.ArgumentParser()
    for name in ("repeats", "layers", "width", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("layouts", nargs="+", help="AXIS=SIZE,... or AXIS=SIZE,...:STAGE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    measure(arguments.layouts[0], None, arguments)  # the first run loads libraries and connects the ranks
    for _ in range(arguments.repeats):
        for named in arguments.layouts:
            layout, _, zero = named.partition(":")
            found = measure(layout, int(zero) if zero else None, arguments)
            if hvd.rank() == 0:
                print(json.dumps({"layout": named, **found}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
