"""Real digits to 97 % at fp16, with a loss scale that moves, and at bf16, on a GPU: the training program as it is."""

from __future__ import annotations

import sys

import datasvc
from gpu_stages.stage import Stage, all_json
from tools.bench.runner import ROOT

MIN_ACCURACY = 0.97
EPOCHS = 12
PRECISIONS = ("fp16", "bf16")


def run(stage: Stage) -> None:
    """Train at both precisions; the accuracy on what was held out is the figure, and below 97 % the stage fails."""
    with stage.timed("data"):
        stage.run(ROOT / "tools" / "make_digits.py", stage.folder / "digits")
        datasvc.open(str(stage.folder / "repository"), create=True).datasets.ingest(
            str(stage.folder / "digits"), "digits"
        )
    reached = {}
    for precision in PRECISIONS:
        with stage.timed(precision):
            events = train(stage, precision)
            (end,) = (event for event in events if event["event"] == "end")
            reached[precision] = end["val_accuracy"]
            if stage.has_gpu:
                stage.report.add_row(f"{precision}: accuracy", "", [end["val_accuracy"]])
                steps_s = [event["step_s"] for event in events if event["event"] == "step"]
                stage.report.add_row(f"{precision}: step", "ms", [1e3 * seconds for seconds in steps_s])
    stage.need_gpu("two steps were taken on the CPU at each precision; no accuracy was measured")
    missed = {precision: accuracy for precision, accuracy in reached.items() if accuracy < MIN_ACCURACY}
    if missed:
        sys.exit(f"below {MIN_ACCURACY:.0%} of the digits held out: {missed}")


def train(stage: Stage, precision: str) -> list[dict]:
    """Run the training program; returns its events."""
    side = stage.choose(64, 16)
    # fmt: off
    printed = stage.run(
        "-m", "datasvc.trainer", "--data", "digits", "--repo", stage.folder / "repository",
        "--name", f"digits-{precision}",
        "--model", "small-cnn", "--epochs", EPOCHS, "--batch-size", 64, "--size", side, "--resize", side,
        "--scale", 0.8, 1.0, "--ratio", 0.9, 1.1, "--flip", 0, "--precision", precision, "--device", stage.device,
        *stage.choose((), ("--max-steps", 2)),
    )
    # fmt: on
    return list(all_json(printed))
