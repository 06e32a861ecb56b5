"""What the run log costs a training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import datasvc.trainer as hvd
from datasvc.repository import Repository
from datasvc.runs import RunLog
from datasvc.trainer.recipes.reporting.recorder import Recorder
from tools.bench.runner import Options, Report, bench, column, run_rounds

Step = Callable[[Callable[[str], None]], float]


@bench(
    repeats=10,
    only={"choices": ["sleep", "compute"], "help": "only these steps"},
    steps=(300, "of each round, with and without a log"),
    step_ms=(10.0, "length of the steps that sleep"),
    width=512,
    batch=256,
)
def run_log(options: Options) -> Report:
    """What the run log costs a training step, measured in two ways in one process.

    1. Processor time: steps that sleep, with a log and without one, in turn. The difference counts all that the log
       computes, in the training thread and in its own, whether the training waits for it or not. It can be measured
       on a busy machine.
    2. Wall clock: steps that compute, with a log and without one, in turn. Only an idle machine shows differences of
       some tenths of a percent.
    """
    torch.set_num_threads(1)
    hvd.init()
    learner = Learner(options.width, options.batch)
    steps: dict[str, Step] = {"sleep": partial(sleep, options.step_ms / 1e3), "compute": learner.step}
    repository = Repository.create(str(options.folder / "run-log"))
    device = torch.device("cpu")
    without, logged = Recorder(device, is_on=False), Recorder(device, is_on=True)
    report = Report("The cost of the run log", "Costs are differences between steps with a log and without.")
    with RunLog.open(repository, "bench") as logged.log:
        turn = StepTurns(options.steps)
        for kind, step in steps.items():
            if options.only in (None, kind):
                turn.run(logged, step)  # warm up
                arms = {"without": partial(turn.run, without, step), "logged": partial(turn.run, logged, step)}
                add_costs(report, kind, run_rounds(arms, options.repeats))
    return report


def add_costs(report: Report, kind: str, found: dict[str, list[dict[str, float]]]) -> None:
    """Add the time of a step, and what the log adds to it, by round."""
    step_s = column(found["without"], "wall_s")
    cost_s = [
        logged - plain
        for logged, plain in zip(column(found["logged"], "cpu_s"), column(found["without"], "cpu_s"), strict=True)
    ]
    report.add_row(f"{kind}: step without a log", "ms", [1e3 * each for each in step_s])
    report.add_row(f"{kind}: processor time of the log", "us a step", [1e6 * each for each in cost_s])
    report.add_ratio(f"{kind}: processor time of the log / step", cost_s, step_s)
    report.add_ratio(f"{kind}: step with a log / without", column(found["logged"], "wall_s"), step_s)


class Learner:
    """A model of four layers whose steps have the marks of the training program."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.inputs = torch.randn(batch, width)

    def step(self, mark: Callable[[str], None]) -> float:
        """Take one step; return its loss."""
        self.optimizer.zero_grad()
        mark("update")
        mark("transfer")
        loss = self.model(self.inputs).square().mean()
        mark("forward")
        loss.backward()
        mark("backward")
        mark("all-reduce")
        self.optimizer.step()
        mark("update")
        return float(loss.detach())


def sleep(step_s: float, mark: Callable[[str], None]) -> float:
    """Sleep for one step, with the marks of the training program."""
    mark("update")
    mark("transfer")
    time.sleep(step_s)
    for part in ("forward", "backward", "all-reduce", "update"):
        mark(part)
    return 0.5


class StepTurns:
    """Runs steps in blocks, which are numbered on."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._first = 1

    def run(self, recorder: Recorder, step: Step) -> dict[str, float]:
        """Return the mean seconds of a step by the wall clock, and the mean processor time of the process."""
        first, self._first = self._first, self._first + self._num_steps
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for number in range(first, self._first):
            recorder.timer.restart()
            loss = step(recorder.timer.begin_parts(number))
            recorder.timer.end_step()
            facts: dict[str, Any] = {"epoch": 0, "progress": number / 1e6, "coverage": 0.5, "loss": loss, "rate": 0.1}
            facts |= {"images_per_s": 1.0, "unit": "images"}
            recorder.report_step(number, recorder.timer.take(), facts)
            recorder.report_diagnosis(number, dict)
            recorder.compare_ranks(number)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return {"wall_s": wall_s / self._num_steps, "cpu_s": cpu_s / self._num_steps}
