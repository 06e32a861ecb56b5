"""Checkpoints of a ResNet-50 with AdamW whose tensors lie on a GPU: see `tools.bench.models` for what is compared.

Beside saves, stalls and restores: the time of a training step on the GPU while a save is being written, by the time
of a step without.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import datasvc
from datasvc.models.tensors.state_tree import flatten, unflatten
from datasvc.trainer.recipes.models import build_model
from gpu_stages.stage import Stage, synchronize
from tools.bench.model_states import MB, State, Training, in_memory, size_of
from tools.bench.models_speed import measure_speed

STEPS_BETWEEN = 2
REPEATS = 3


def run(stage: Stage) -> None:
    """Compare saves and restores, and the steps beside them."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it shall be: one process
    name, repeats = stage.choose(("resnet50", REPEATS), ("small-cnn", 1))
    with stage.timed("states"):
        states = [to_device(state, stage.device) for state in make_states(name)]
        stage.report.add_row("state", "MB", [size_of(states[-1]) / MB])
    with stage.timed("steps beside a save"):
        measure_steps(stage, name, repeats=repeats)
    stage.need_gpu("a small model was saved from the CPU while it was trained; nothing was saved from a GPU")
    with stage.timed("saves and restores"):
        measure_speed(stage.report, states, stage.folder, optimizer="adamw", repeats=repeats)


def make_states(name: str) -> list[State]:
    """Return two states of a training on real images, some steps apart, on the CPU."""
    training, states = Training("adamw", frozen=False, model=name), []
    for _ in range(2):
        for _ in range(STEPS_BETWEEN):
            training.step()
        states.append(in_memory(training.state()))
    return states


def to_device(state: State, device: str) -> State:
    """Return a state whose tensors lie on a device, as an optimizer there has them: scalars too."""
    skeleton, tensors = flatten(state)
    moved: State = unflatten(skeleton, {name: tensor.to(device) for name, tensor in tensors.items()})
    return moved


def measure_steps(stage: Stage, name: str, *, repeats: int) -> None:
    """Add the time of steps without a save, and of those until a save is committed; and for how long it blocks."""
    step, state = make_step(name, stage.device, batch=stage.choose(128, 2), size=stage.choose(224, 32))
    model = datasvc.open(str(stage.folder / "own"), create=True).models.manager(name, codec="planes")
    plain_s, beside_s, stalls_s = [], [], []
    with model:
        for repeat in range(repeats + 1):
            plain = time_steps(step, stage.device, until=lambda: False, at_most=stage.choose(30, 1))
            synchronize(stage.device)
            began = time.perf_counter()
            handle = model.save(state(), step=repeat)
            stall_s = time.perf_counter() - began
            beside = time_steps(step, stage.device, until=handle.done, at_most=1000)
            handle.result()
            if repeat:  # the first one also takes memory for the copies
                plain_s.append(plain)
                beside_s.append(beside)
                stalls_s.append(stall_s)
    stage.report.add_row(f"{name}: step", "ms", [1e3 * seconds for seconds in plain_s])
    stage.report.add_row(f"{name}: step while a save is written", "ms", [1e3 * seconds for seconds in beside_s])
    stage.report.add_row(
        f"{name}: blocked by Model.save between steps", "ms", [1e3 * seconds for seconds in stalls_s]
    )
    stage.report.add_ratio(f"{name}: step while a save is written / step", beside_s, plain_s)


def make_step(name: str, device: str, *, batch: int, size: int) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return what takes a step with AdamW, and what gives the state."""
    model = build_model(name, 1000).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    step()
    return step, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def time_steps(step: Callable[[], None], device: str, *, until: Callable[[], bool], at_most: int) -> float:
    """Return the median seconds of a step, of as many as are taken until something is done: one at least."""
    times = []
    while not times or (len(times) < at_most and not until()):
        began = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
