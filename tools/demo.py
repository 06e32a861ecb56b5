"""The main job end to end on real images: ingest, stage, train on two ranks, kill, resume, compare, restore.

    python tools/demo.py FOLDER

FOLDER is made anew. Every step runs the command that a user would run, and the end says what was done and measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

RANKS = 2
EPOCHS = 12
BATCH_SIZE = 32  # of a rank
CHECKPOINT_EVERY = 30  # steps; an epoch has 22, so checkpoints fall inside epochs
KILL_AT_STEP = 100
MIN_ACCURACY = 0.97
MARKER = ".made-by-the-datasvc-demo"

console = Console(highlight=False)


@dataclass
class Run:
    """What the events of one training process said."""

    pids: list[int] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    seconds: float = 0.0


class Demo:
    """The demo's folder and the commands that run in it."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "digits"
        self.repo = folder / "repo"
        self.cache = folder / "cache"
        self.restored = folder / "restored"
        self.ledgers = folder / "ledgers"
        self.environment = {**os.environ, "DATASVC_REPO": str(self.repo), "DATASVC_CACHE": str(self.cache)}

    def datasvc(self, *arguments: str) -> None:
        """Run a `datasvc` command, shown with its output."""
        console.print(f"$ datasvc {' '.join(arguments)}", markup=False, style="bold")
        console.print(self._run(*arguments).rstrip(), markup=False)

    def query(self, *arguments: str) -> Any:
        """Run a `datasvc` command with --json; returns its value."""
        return json.loads(self._run(*arguments, "--json"))

    def _run(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "datasvc.cli.main", *arguments]
        done = subprocess.run(command, env=self.environment, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def train(self, name: str, title: str, *, kill_at_step: int | None = None) -> Run:
        """Train `name` on two ranks, from its newest checkpoint where it has one."""
        # fmt: off
        command = [
            sys.executable, "-m", "datasvc.trainer.launch", "-np", str(RANKS), "--no-prefix",
            sys.executable, "-m", "datasvc.trainer", "--data", "digits@1", "--repo", str(self.repo),
            "--cache", str(self.cache), "--name", name, "--model", "small-cnn",
            "--epochs", str(EPOCHS), "--batch-size", str(BATCH_SIZE),
            "--size", "64", "--resize", "64", "--scale", "0.8", "1.0", "--ratio", "0.9", "1.1", "--flip", "0",
            "--checkpoint-every", str(CHECKPOINT_EVERY), "--ledger", str(self.ledgers / name),
        ]
        # fmt: on
        console.print(f"$ {' '.join(['python', *command[1:6], 'python', *command[7:]])}", markup=False, style="bold")
        started = time.perf_counter()
        process = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        run = Run()
        for event in _shown(title, _events(process.stdout)):
            _record(run, event)
            if kill_at_step is not None and len(run.steps) == kill_at_step:
                for pid in (*run.pids, process.pid):
                    os.kill(pid, signal.SIGKILL)
        code = process.wait()
        run.seconds = time.perf_counter() - started
        if (code == 0) == (kill_at_step is not None):
            sys.exit(f"the training ended with status {code}, which it should not have")
        return run


def _record(run: Run, event: dict[str, Any]) -> None:
    match event["event"]:
        case "start":
            run.pids.append(event["pid"])
        case "step":
            run.steps.append(event)
        case "checkpoint":
            run.checkpoints.append(event)
        case "end":
            run.end = event


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)
        else:
            console.print(line.rstrip(), markup=False)


def _shown(title: str, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pass events on, showing a bar of steps with the loss."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None, loss="")
        for event in events:
            if event["event"] == "step":
                loss = f"loss {event['loss']:.3f}"
                progress.update(task, completed=event["progress"], total=1, loss=loss)
            yield event


def _median(run: Run, name: str) -> float:
    """Return the median over the steps of a run, the first ones left out."""
    return statistics.median(step[name] for step in run.steps[5:])


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    started = time.perf_counter()
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        sys.exit(f"{folder} is not empty and was not made by the demo: name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    demo = Demo(folder)

    console.rule("1  real images into a versioned data set")
    subprocess.run([sys.executable, str(Path(__file__).with_name("make_digits.py")), str(demo.source)], check=True)
    demo.datasvc("ingest", str(demo.source), "digits", "--shard-size", "256KiB", "-m", "1,797 scanned digits")
    demo.datasvc("ls")

    console.rule("2  onto this node, never over the budget")
    demo.datasvc("stage", "digits@1", "--budget", "10MB")
    demo.datasvc("cache", "status")

    console.rule("3  train on two ranks, undisturbed")
    whole = demo.train("digits-cnn-undisturbed", "training")

    console.rule("4  the same, killed with SIGKILL in the middle of an epoch")
    killed = demo.train("digits-cnn", "to be killed", kill_at_step=KILL_AT_STEP)
    last = killed.checkpoints[-1]
    lost = killed.steps[-1]["step"] - last["step"]
    console.print(f"killed after step {killed.steps[-1]['step']}; the newest version is {last['version']}")

    console.rule("5  resumed from its newest version")
    resumed = demo.train("digits-cnn", "resumed")
    assert whole.end is not None
    assert resumed.end is not None

    console.rule("6  proof that the run that was killed has lost no sample and served none twice")
    demo.datasvc("audit", str(demo.ledgers / "digits-cnn"))

    console.rule("7  what the model knows of itself")
    demo.datasvc("models", "log", "digits-cnn")
    demo.datasvc("models", "show", resumed.end["version"])
    demo.datasvc("models", "restore", resumed.end["version"], str(demo.restored))

    undisturbed = demo.query("models", "show", whole.end["version"])
    final = demo.query("models", "show", resumed.end["version"])
    usage = demo.query("cache", "status")
    same_bits = undisturbed["content"] == final["content"]
    accuracy = resumed.end["val_accuracy"]

    console.rule("what was done and measured")
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    facts = {
        "data set": f"digits@1: {demo.query('ls')[0]['samples']} real scans, a fifth held out",
        "node cache": f"{usage['resident_bytes']} bytes resident of a budget of {usage['budget_bytes']}",
        "training": f"{RANKS} ranks, {whole.end['step']} steps of {BATCH_SIZE * RANKS} images, "
        f"{BATCH_SIZE * RANKS / _median(whole, 'step_s'):.0f} images/s in the median step, of which "
        f"{_median(whole, 'wait_s') / _median(whole, 'step_s'):.1%} waits for data; {whole.seconds:.1f} s in all",
        "held-out accuracy": f"{accuracy:.2%}",
        "killed": f"with SIGKILL after step {killed.steps[-1]['step']}, inside epoch {killed.steps[-1]['epoch']}; "
        f"{lost} steps since {last['version']} were done again",
        "resumed": f"from {last['version']} at step {resumed.steps[0]['step'] - 1}, "
        f"{resumed.seconds:.1f} s to the end",
        "undisturbed weights": undisturbed["content"],
        "resumed weights": final["content"] + ("  equal, bit for bit" if same_bits else "  DIFFERENT"),
        "restored": f"{demo.restored}/tensors.safetensors, every byte verified",
        "whole demo": f"{time.perf_counter() - started:.0f} s",
    }
    for name, fact in facts.items():
        table.add_row(Text(name, style="bold"), Text(fact))
    console.print(table, soft_wrap=True)
    program = os.path.relpath(Path(sys.executable).with_name("datasvc"))
    repo, ledgers = os.path.relpath(demo.repo), os.path.relpath(demo.ledgers)
    console.print(f"see it in the browser: {program} ui --repo {repo} --runs {ledgers}", markup=False, soft_wrap=True)
    if not same_bits:
        sys.exit("the resumed run ended with other weights than the undisturbed one")
    if accuracy < MIN_ACCURACY:
        sys.exit(f"held-out accuracy is {accuracy:.2%}, below {MIN_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
