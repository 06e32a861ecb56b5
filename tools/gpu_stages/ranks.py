"""The trainer on a GPU: one rank over NCCL, and two that share the GPU over gloo, through the host's memory.

Beside what `rank_checks.py` checks and times, the steps of `tools.bench.trainer` with CUDA tensors: ours beside
torch's DDP. Each rank has one thread.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from gpu_stages.stage import Stage, all_json, last_json
from tools.bench import trainer
from tools.bench.runner import call_command

CHECKS = Path(__file__).with_name("rank_checks.py")
BACKENDS = {1: "NCCL", 2: "gloo"}


def run(stage: Stage) -> None:
    """Check and time the operations at one rank and two, then compare the steps of two ranks with DDP's."""
    numbers = stage.choose(25_600_000, 1000)
    for num_ranks, on_gpu in BACKENDS.items():
        backend = stage.choose(on_gpu, "gloo on the CPU")
        with stage.timed(f"{num_ranks} rank{'s' * (num_ranks > 1)}"):
            found = last_json(launch(stage, num_ranks, CHECKS, "--device", stage.device, "--numbers", numbers))
            stage.report.add_row(f"{num_ranks} of {backend}: operations checked", "", [found["num_checks"]])
            if stage.has_gpu:
                for name, times_ms in found["times_ms"].items():
                    stage.report.add_row(f"{num_ranks} of {backend}: {name}", "ms", times_ms)
    stage.need_gpu("operations were checked on CPU tensors over gloo; NCCL and CUDA tensors were not")
    with stage.timed("steps of two ranks"):
        _, *compare = call_command(trainer.run_part, "compare", 3, 1.0, list(trainer.WORKLOADS), stage.device)
        add_steps(stage, all_json(launch(stage, 2, *compare)))


def launch(stage: Stage, num_ranks: int, *words: Any) -> str:
    """Run Python with these words on some ranks of this machine; returns what they printed."""
    command = ("-P", "-m", "datasvc.trainer.launch", "-np", num_ranks, "--no-prefix", sys.executable, "-P")
    return stage.run(*command, *words, environment={"OMP_NUM_THREADS": "1"})


def add_steps(stage: Stage, lines: list[dict[str, Any]]) -> None:
    """Add milliseconds of a step by workload and way, and ours by each of the others."""
    times_ms: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        times_ms[line["workload"]][line["way"]].append(line["ms"])
    for workload, ways in times_ms.items():
        for way, values in ways.items():
            stage.report.add_row(f"2 of gloo, {workload}: {way}", "ms/step", values)
        for way in ways.keys() - {"ours"}:
            stage.report.add_ratio(f"2 of gloo, {workload}: time of {way} / ours", ways[way], ways["ours"])
