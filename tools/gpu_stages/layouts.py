"""Layouts on a GPU: the memory that recomputation and offloading save, and a pipeline of two ranks that share it.

The ranks of the pipeline communicate over gloo. `layout_checks.py` compares the losses of each way with those of a
model that is not divided.
"""

from __future__ import annotations

from pathlib import Path

from gpu_stages.ranks import launch
from gpu_stages.stage import Stage, last_json

CHECKS = Path(__file__).with_name("layout_checks.py")
WHOLE = "whole"


def run(stage: Stage) -> None:
    """Train in each way, on one rank and on two."""
    sizes = stage.choose((), ("--width", 32, "--block", 16))
    options = ("--device", stage.device, *sizes)
    with stage.timed("recompute and offload"):
        peaks = last_json(stage.run("-P", CHECKS, *options))["peak_bytes"]
        if stage.has_gpu:
            for way, size_bytes in peaks.items():
                stage.report.add_row(f"1 rank, {way}: peak memory of the GPU", "MB", [size_bytes / 1e6])
            for way in peaks.keys() - {WHOLE}:
                stage.report.add_ratio(f"1 rank: peak of {way} / {WHOLE}", [peaks[way]], [peaks[WHOLE]])
    with stage.timed("pipeline of two ranks"):
        losses = last_json(launch(stage, 2, CHECKS, *options))["losses"]
        stage.report.add_row(f"2 of gloo, pipeline on {stage.device}: last loss, as of one process", "", [losses[-1]])
    stage.need_gpu("losses were compared on the CPU; no memory was measured, and no CUDA tensor sent between stages")
