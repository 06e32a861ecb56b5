"""Seconds for which the others wait when a process of a job is killed or stopped in the middle of a step."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

import datasvc
from datasvc.trainer.rendezvous.messages import WORKER_VARIABLE
from tools.bench.runner import ROOT, Options, Report, bench, call_command, environment, launch_command, turns

VOCABULARY: Final = 29
# fmt: off
SETTINGS: Final = (
    "--data", "tokens@1", "--model", "gpt", "--model-option", "layers=2", "heads=4", "width=32", "dropout=0.0",
    "context=8", "--vocabulary", str(VOCABULARY), "--epochs", "6", "--optimizer", "sgd", "--learning-rate", "0.1",
    "--checkpoint-every", "1000", "--report-every", "1", "--device", "cpu",
)
# fmt: on
_UPDATE: Final = "datasvc.trainer.recipes.train:update"
_ELASTIC: Final = ("--elastic", "--global-batch", "12")
_REPLICAS: Final = ("--layout", "replica=3,shard=2", *_ELASTIC, "--commit-every", "1")


@dataclass(frozen=True)
class Loss:
    """A job that loses a process.

    Attributes:
        ranks: number of ranks, servers included.
        launch: options of the launcher.
        settings: options of the training program.
        victim: rank that is lost.
        before: function, MODULE:NAME or MODULE:CLASS.NAME, before whose call it is lost.
        call: number of that call, from 1.
        number: name of the signal.
        error: what the other processes report, if the job ends.
    """

    ranks: int
    launch: tuple[str, ...]
    settings: tuple[str, ...]
    victim: int
    before: str
    call: int
    number: str = "SIGKILL"
    error: str = ""


_THREE: Final = (3, ("--min-num-proc", "2"), _ELASTIC, 1, _UPDATE, 20)
_SERVED: Final = (5, ("--servers", "2"), ("--sync", "ssp:3", "--batch-size", "4"))
LOSSES: Final = {
    "elastic, 3 ranks; one is killed": Loss(*_THREE),
    "elastic, 3 ranks; one is stopped": Loss(*_THREE, "SIGSTOP"),
    "elastic, 3 replicas of 2 ranks, diloco:4; a rank is killed": Loss(
        6, ("--min-num-proc", "4"), (*_REPLICAS, "--sync", "diloco:4"), 3, _UPDATE, 20
    ),
    "ssp:3, 2 servers, 3 workers; a worker is killed": Loss(
        *_SERVED, 3, "datasvc.trainer.servers.worker_client:WorkerClient.push", 8
    ),
    "ssp:3, 2 servers, 3 workers; a server is killed: to the error that names it": Loss(
        *_SERVED,
        1,
        "datasvc.trainer.servers.parameter_shard:ParameterShard.apply",
        40,
        error="server 1 (rank 1) is lost",
    ),
}


@bench(repeats=3)
def lost_ranks(options: Options) -> Report:
    """The longest time without a step from the loss of a process on, or the time to the error of a job that ends.

    All processes are on this machine. The model is tiny, so the time is that in which the loss is found, and the rest
    forms a new round, builds its model and loaders, and makes a step.
    """
    waits: dict[str, list[float]] = {name: [] for name in LOSSES}
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder, "source"))
        repo = datasvc.open(f"{folder}/repo", create=True)
        repo.datasets.ingest(f"{folder}/source", "tokens")
        for number, name in turns(LOSSES, options.repeats):
            waits[name].append(measure(LOSSES[name], f"{folder}/repo", f"m{number}-{list(LOSSES).index(name)}"))
    report = Report("a small transformer; all processes on this machine")
    for name, seconds in waits.items():
        report.add_row(name, "s", seconds)
    return report


def write_tokens(folder: Path) -> None:
    """Write splits of blocks of 8 tokens, each of which follows from the one before."""
    for split, num_blocks in (("train", 96), ("val", 16)):
        (folder / split).mkdir(parents=True)
        blocks = [[(block + 3 * place) % VOCABULARY for place in range(8)] for block in range(num_blocks)]
        table = pa.table({"tokens": pa.array(blocks, pa.list_(pa.int32(), 8))})
        pq.write_table(table, folder / split / "blocks.parquet")


def measure(loss: Loss, repo: str, name: str) -> float:
    """Run a job; return the longest seconds without a step after the loss, or those to its error."""
    words = [*SETTINGS, "--repo", repo, "--name", name, *loss.settings]
    called = call_command(train, loss.victim, loss.before, loss.call, loss.number, words)
    command = [*launch_command(loss.ranks), *loss.launch, *called]
    times: list[float] = []  # of the loss and the steps after it
    variables = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    errors: list[str] = []
    error_s = 0.0
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line) if line.startswith("{") else {}
            if not event:
                errors.append(line)
                error_s = error_s or (time.monotonic() if loss.error and loss.error in line else 0.0)
            if event.get("event") == "losing":
                times.append(event["at_s"])
            elif times and event.get("event") == "step":
                times.append(time.monotonic())
    assert times, "".join(errors)
    assert bool(process.returncode) == bool(error_s) == bool(loss.error), "".join(errors)
    if error_s:
        return error_s - times[0]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def train(victim: int, before: str, call: int, number: str, words: list[str]) -> None:
    """Be a process of a job; the victim reports that it is lost, and sends itself a signal."""
    from datasvc.trainer.__main__ import main

    rank = int(os.environ.get(WORKER_VARIABLE, f":{os.environ['RANK']}").rpartition(":")[2])
    module, _, path = before.partition(":")
    owner: Any = importlib.import_module(module)
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    real, left = getattr(owner, name), call

    def act(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            print(json.dumps({"event": "losing", "at_s": time.monotonic()}), flush=True)
            os.kill(os.getpid(), getattr(signal, number))
        return real(*arguments, **options)

    if rank == victim:
        setattr(owner, name, act)
    main(words)
