"""How well the step of a target loss is forecast from the first part of a run."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

import datasvc
from datasvc.runs import RunHistory, RunLog, read_run
from tools.bench.runner import Options, Report, bench

# Runs that differ in what bends a curve: model, optimizer, rate and batch.
RUNS = [
    (model, optimizer, rate, batch)
    for model in ("linear", "mlp")
    for optimizer, rate, batch in (
        ("sgd", 0.02, 32), ("sgd", 0.1, 32), ("sgd", 0.1, 128), ("adam", 0.0003, 32), ("adam", 0.001, 64)
    )
]  # fmt: skip


@bench(repeats=1, steps=2000, seen=(0.5, "fraction of the steps that the forecast sees"))
def loss_forecast(options: Options) -> Report:
    """Ten runs on the digits: the forecast of the loss that was reached after three quarters, from the first half.

    The target is the mean loss from 0.7 to 0.8 of the steps, so the right answer is 0.75 of them. The rates of the
    runs are constant.
    """
    torch.set_num_threads(1)
    repository = datasvc.open(str(options.folder / "repo"), create=True).repository
    report = Report(f"Forecasts of {len(RUNS)} runs of {options.steps:,} steps from {options.seen:.0%} of them")
    steps, inside = [], []
    for number, (model, optimizer, rate, batch) in enumerate(RUNS):
        history = train(repository, number, model, optimizer, rate, batch, options.steps)
        loss = history.series["loss"]
        is_target = (loss.steps > 0.7 * options.steps) & (loss.steps <= 0.8 * options.steps)
        found = cut(history, round(options.seen * options.steps)).forecast(float(loss.values[is_target].mean()))
        right = 0.75 * options.steps
        steps.append(np.inf if found.step is None else found.step / right)
        is_inside = found.low is not None and found.low <= right and (found.high is None or right <= found.high)
        inside.append(float(is_inside))
        report.add_row(f"{model}, {optimizer} {rate}, batch {batch}: forecast / right step", "", steps[-1:])
    report.add_row("all: forecast / right step", "", steps)
    report.add_row("share of intervals with the right step", "", [float(np.mean(inside))])
    return report


def cut(history: RunHistory, steps: int) -> RunHistory:
    """Return what was known of a run after so many steps."""
    loss = history.series["loss"]
    known = loss.steps <= steps
    fields = {field.name: getattr(loss, field.name)[known] for field in dataclasses.fields(loss)}
    return dataclasses.replace(history, series={"loss": type(loss)(**fields)})


def train(
    repository: datasvc.Repository, seed: int, model: str, optimizer: str, rate: float, batch: int, steps: int
) -> RunHistory:
    """Train on the digits, and return what the log of the run has."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32, device="cpu")
    labels = torch.tensor(digits.target, device="cpu")
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
    net = torch.nn.Linear(64, 10) if model == "linear" else torch.nn.Sequential(*layers)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    chosen = kinds[optimizer](net.parameters(), rate)
    with RunLog.open(repository, "forecast") as log:
        for step in range(1, steps + 1):
            drawn = torch.randint(len(labels), (batch,))
            loss = torch.nn.functional.cross_entropy(net(images[drawn]), labels[drawn])
            chosen.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            chosen.step()
            log.report("step", step=step, loss=loss.item())
    return read_run(repository, log.name, log.id)
