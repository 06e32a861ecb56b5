"""What a stage of the GPU day runs with, and where it puts what it finds.

A stage runs on any machine: without a GPU it makes small data, does the part that needs none, and then raises
`NeedsGpu`. Figures are written as they are found, so a stage that is ended keeps those that it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from datasvc.durable import write_file
from gpu_stages.runner import search_path
from tools.bench.runner import ROOT, Report, describe_commit, describe_machine

FIGURES: Final = "figures.json"
PACKAGES: Final = (
    "torch",
    "numpy",
    "pillow",
    "pyarrow",
    "nvidia-dali-cuda130",
    "nvidia-nvimgcodec-cu13",
    "nvidia-nccl-cu13",
)

T = TypeVar("T")


class NeedsGpu(Exception):  # noqa: N818 - no error: it is how a stage ends without a GPU
    """The rest of a stage needs a GPU, and this machine has none; the message says what was not done."""


class Stage:
    """A stage that runs in this process.

    Args:
        folder: empty, for its data; removed once it is over.
        device: "cuda" or "cpu"; None: a GPU where there is one.
        kept: folder for what later runs and other stages can use; None: `folder`.
        name: name of the stage.

    Attributes:
        folder, kept: as given.
        device: where it computes.
        report: rows and ratios that it found.
        durations: seconds of its parts, by name.
    """

    def __init__(
        self, folder: Path, *, device: str | None = None, kept: Path | None = None, name: str = "stage"
    ) -> None:
        self.folder = folder
        self.kept = kept or folder
        self._name = name
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.report = Report("")
        self.durations: dict[str, float] = {}

    @property
    def has_gpu(self) -> bool:
        """Whether figures mean something; without, everything is small."""
        return self.device == "cuda"

    def once(self, part: str, find: Callable[[], T]) -> T:
        """Return what `find` returns, a JSON value; a later run of an interrupted stage reads it instead."""
        digest = hashlib.sha256(f"{describe_surroundings()['commit']} {self.device} {part}".encode()).hexdigest()[:16]
        path = self.kept / f"{self._name}.{digest}.json"
        if path.exists():
            print(f"{part}: done before", flush=True)
            return json.loads(path.read_bytes())
        found = find()
        write_file(path, json.dumps(found).encode(), synced=False)
        return found

    def choose(self, on_gpu: T, without: T) -> T:
        """Return a size: the one that is measured, or a small one where there is no GPU."""
        return on_gpu if self.has_gpu else without

    def need_gpu(self, what: str) -> None:
        """Raise `NeedsGpu` where there is none: `what` was not done, "not measured: decoding on the GPU"."""
        if not self.has_gpu:
            raise NeedsGpu(what)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Take the time of a part, and write what was found by its end."""
        print(f"{part} ...", flush=True)
        began = time.perf_counter()
        yield
        self.durations[part] = time.perf_counter() - began
        self.write()

    def run(
        self,
        *command: Any,
        environment: Mapping[str, str] | None = None,
        check: bool = True,
        limit_s: float | None = None,
    ) -> str:
        """Run a program of this interpreter in a process of its own; returns what it printed.

        What it writes to standard error goes to the log of the stage.

        Raises:
            subprocess.CalledProcessError: it ended with another status than 0, and `check` is given.
            subprocess.TimeoutExpired: it did not end within `limit_s`, and was killed.
        """
        words = [sys.executable, *map(str, command)]
        print(f"$ python {' '.join(words[1:])}", flush=True)
        environment = {**os.environ, "PYTHONPATH": search_path(), **(environment or {})}
        done = subprocess.run(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=limit_s
        )
        if done.returncode:
            print(done.stdout, flush=True)  # the log says why
        if done.returncode and check:
            raise subprocess.CalledProcessError(done.returncode, words)
        return done.stdout

    def write(self, status: str | None = None, reason: str = "") -> None:
        """Write what was found so far, and how the stage ended where it did."""
        content = {
            "status": status,
            "reason": reason,
            **describe_surroundings(),
            "durations_s": {name: round(seconds, 3) for name, seconds in self.durations.items()},
            "rows": [row.to_dict() for row in self.report.rows],
            "ratios": [ratio.to_dict() for ratio in self.report.ratios],
        }
        write_file(self.folder / FIGURES, json.dumps(content).encode(), synced=False)


@cache
def describe_surroundings() -> dict[str, Any]:
    """Return what the figures of this process depend on."""
    return {
        "commit": describe_commit(),
        "machine": describe_machine(),
        "device": describe_device(),
        "versions": describe_versions(),
    }


def describe_device() -> dict[str, Any] | None:
    """Return the name, memory and driver of the GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def _driver_version() -> str | None:
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the figures depend on, of those that are installed."""
    found = {"python": sys.version.partition(" ")[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def synchronize(device: str) -> None:
    """Wait until the device has done everything that it was given."""
    if device != "cpu":
        torch.cuda.synchronize()


def last_json(printed: str) -> dict[str, Any]:
    """Return the last line that is a JSON object."""
    return json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])


def all_json(printed: str) -> Sequence[dict[str, Any]]:
    """Return the lines that are JSON objects."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
