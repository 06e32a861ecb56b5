"""What the run log costs a training step, measured in two ways in one process.

1. Processor time: steps that sleep, with a log and without one, in turn. The difference counts all that the log
   computes, in the training thread and in its own, whether the training waits for it or not. It can be measured on a
   busy machine.
2. Wall clock: steps that compute, with a log and without one, in turn. Only an idle machine shows differences of some
   tenths of a percent.

`PYTHONPATH=. python tools/bench/run_log.py --repo /tmp/repo`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import datasvc.trainer as hvd
from datasvc.repository import Repository
from datasvc.runs import RunLog
from datasvc.trainer.recipes.reporting.recorder import Recorder

Step = Callable[[Callable[[str], None]], float]


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


def run_steps(recorder: Recorder, step: Step, first: int, num_steps: int) -> tuple[float, float]:
    """Return the mean seconds of a step by the wall clock, and the mean processor time of the process."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for number in range(first, first + num_steps):
        loss = step(recorder.begin_step(number))
        facts: dict[str, Any] = {"epoch": 0, "progress": number / 1e6, "coverage": 0.5, "loss": loss, "rate": 0.1}
        facts |= {"images_per_s": 1.0, "unit": "images"}
        recorder.report_step(number, step_s=0.01, wait_s=0.0, facts=facts)
        recorder.report_diagnosis(number, dict)
        recorder.compare_ranks(number)
    return (time.perf_counter() - began_s) / num_steps, (time.process_time() - began_cpu_s) / num_steps


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> None:
    """Print what the log costs, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=["sleep", "compute"], help="only these steps")
    parser.add_argument("--steps", type=int, default=300, help="steps of each round, with and without a log")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of the steps that sleep")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repo", help="folder of the repository; default: a temporary one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    learner = Learner(args.width, args.batch)
    steps: dict[str, Step] = {"sleep": lambda mark: sleep(args.step_ms / 1e3, mark), "compute": learner.step}
    result: dict[str, Any] = {"n": args.rounds}
    with contextlib.ExitStack() as stack:
        folder = args.repo or stack.enter_context(tempfile.TemporaryDirectory())
        repository = Repository.create(str(Path(folder) / "run-log"))
        device = torch.device("cpu")
        without, logged = Recorder(device, is_on=False), Recorder(device, is_on=True)
        logged.log = stack.enter_context(RunLog.open(repository, "bench"))
        first = 1
        for kind, step in steps.items() if args.only is None else [(args.only, steps[args.only])]:
            run_steps(logged, step, first, 10)  # warm up
            times: dict[Recorder, list[tuple[float, float]]] = {without: [], logged: []}
            for number in range(args.rounds):
                # Which one is the first alternates, so that a drift of the machine favours neither.
                for recorder in (without, logged)[:: 1 if number % 2 else -1]:
                    first += args.steps
                    times[recorder].append(run_steps(recorder, step, first, args.steps))
            pairs = list(zip(times[without], times[logged], strict=True))
            step_s = statistics.median(wall_s for wall_s, _ in times[without])
            result[kind] = {
                "step_ms": round(1e3 * step_s, 3),
                "cpu_us": spread([1e6 * (with_[1] - without_[1]) for without_, with_ in pairs]),
                "cpu_percent": spread([100 * (with_[1] - without_[1]) / step_s for without_, with_ in pairs]),
                "wall_percent": spread([100 * (with_[0] / without_[0] - 1) for without_, with_ in pairs]),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
