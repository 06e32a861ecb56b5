"""Loss over time of the training program with several settings `--sync`: two nodes over a slow link."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import datasvc
import datasvc.trainer.recipes.train as training
from datasvc.trainer.env.environment import NUM_SERVERS
from datasvc.trainer.recipes.servers import job
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.servers.coordinator import Coordinator
from tools.bench.runner import Options, Report, bench, turns
from tools.bench.slow_link import delayed_nodes, run_on_nodes
from tools.make_digits import write_digits

BSP = "bsp"
WAYS = (BSP, "local:4", "local:16", "diloco:16", "gossip:ring:4")
SERVER_WAYS = ("ssp:3", "async")


@bench(
    repeats=1,
    mbit=(1000, "of the link"),
    delay_ms=(20.0, "of the link, in each direction"),
    epochs=(8, "of each run"),
)
def sync_curves(options: Options) -> Report:
    """Loss over time with each `--sync`, over a slow link.

    The nodes are network namespaces with one rank each. They train the small CNN on the digits, in 14 steps of 96
    samples an epoch, and evaluate after each epoch. Time counts from the first step and includes the evaluations. The
    losses are those of the newest evaluation at each quarter of the time that `bsp` takes; NaN: there was none yet.

    `ssp` and `async` have a parameter server and a worker on the first node, and two workers on the second one, with
    the same global batch.
    """
    runs: dict[str, dict[int, list[dict[str, Any]]]] = {way: defaultdict(list) for way in (*WAYS, *SERVER_WAYS)}
    with (
        tempfile.TemporaryDirectory() as folder,
        delayed_nodes(options.mbit * 1e6 / 8, options.delay_ms / 1e3) as nodes,
    ):
        write_digits(Path(folder, "digits"), seed=0)
        repo = datasvc.open(f"{folder}/repo", create=True)
        repo.datasets.ingest(f"{folder}/digits", "digits")
        url = repo.repository.url
        for point in run_on_nodes(nodes, 1, train_ways, url, options.repeats, options.epochs):
            runs[point["way"]][point["round"]].append(point)
        for number, way in turns(SERVER_WAYS, options.repeats):
            for point in run_on_nodes(nodes, 2, train_with_server, url, number, way, options.epochs):
                runs[way][number].append(point)
    report = Report(
        f"2 nodes of 1 rank, {options.mbit} Mbit/s, {options.delay_ms:g} ms, digits, {options.epochs} epochs"
    )
    totals = {way: [points[-1]["s"] for points in rounds.values()] for way, rounds in runs.items()}
    report.add_rows("s", totals)
    for way, rounds in runs.items():
        report.add_row(f"{way}: accuracy at the end", "%", [100 * each[-1]["accuracy"] for each in rounds.values()])
        for quarter in range(1, 5):
            losses = [
                loss_at(points, total * quarter / 4)
                for points, total in zip(rounds.values(), totals[BSP], strict=True)
            ]
            report.add_row(f"{way}: loss at {quarter}/4 of the time of {BSP}", "nats", losses)
    for way in (*WAYS[1:], *SERVER_WAYS):
        report.add_ratio(f"time: {BSP} / {way}", totals[BSP], totals[way])
    return report


def loss_at(points: list[dict[str, Any]], at_s: float) -> float:
    """Return the loss of the newest evaluation at a time; NaN if there was none yet."""
    losses: list[float] = [point["loss"] for point in points if point["s"] <= at_s]
    return losses[-1] if losses else float("nan")


def train_ways(repo: str, repeats: int, epochs: int) -> None:
    """Be a rank of `sync_curves`; rank 0 prints each evaluation."""
    dist.init_process_group("gloo")  # the trainer uses it too, and leaves it standing
    real = training.go_through_epochs
    for number, way in turns(WAYS, repeats):
        events = _Evaluations(number, way)

        def go_through_epochs(*arguments: Any, events: _Evaluations = events) -> None:
            dist.barrier()
            events.began_s = time.monotonic()
            real(*arguments)

        def choose_events(_stream: Any, events: _Evaluations = events) -> _Evaluations:
            return events

        training.go_through_epochs, training.choose_events = go_through_epochs, choose_events  # type: ignore[assignment, attr-defined]
        training.train(choose_settings(repo, number, way, epochs, batch_size=48))
    dist.destroy_process_group()


def train_with_server(repo: str, number: int, way: str, epochs: int) -> None:
    """Be a process of a run with a parameter server; the server prints each evaluation."""
    os.environ[NUM_SERVERS] = "1"
    events, real = _Evaluations(number, way), Coordinator.run_steps

    def run_steps(coordinator: Coordinator, *arguments: Any) -> Any:
        events.began_s = events.began_s or time.monotonic()
        return real(coordinator, *arguments)

    with patch.object(Coordinator, "run_steps", run_steps), patch.object(job, "choose_events", lambda _: events):
        job.train_any(choose_settings(repo, number, way, epochs, batch_size=32))


def choose_settings(repo: str, number: int, way: str, epochs: int, *, batch_size: int) -> TrainConfig:
    """Return the settings of a run."""
    # fmt: off
    return TrainConfig(
        data="digits@1", repo=repo, name=f"{way.replace(':', '-')}-{number}", sync=way, epochs=epochs, size=32,
        resize=32, scale=(0.8, 1.0), flip=0.0, batch_size=batch_size, evaluate_every=1, checkpoint_every=100_000,
        report_every=16, device="cpu", run_log=False,
    )
    # fmt: on


class _Evaluations:
    """A sink of events that prints the evaluations of rank 0 with their times."""

    def __init__(self, number: int, way: str) -> None:
        self._facts = {"round": number, "way": way}
        self.began_s = 0.0

    def report(self, event: str, **facts: Any) -> None:
        if event == "evaluation":
            elapsed_s = time.monotonic() - self.began_s
            point = {**self._facts, "s": elapsed_s, "loss": facts["val_loss"], "accuracy": facts["val_accuracy"]}
            print(json.dumps(point), flush=True)
