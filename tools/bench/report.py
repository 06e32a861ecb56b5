"""What the benchmarks share: alternating repeats, medians with their spread, and how results are shown.

Absolute figures move with the machine and with what else runs on it. So whatever is compared runs side by side: every
repeat runs all contestants, each repeat in the opposite order of the one before, and a ratio is taken within each
repeat before the median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).parents[2]
_WIDTH_OF_A_FILE = 160

Contestants = Mapping[str, Callable[[], float]]


@dataclass(frozen=True)
class Figure:
    """Repeats of one measurement.

    Attributes:
        name: what was measured.
        unit: of the values; empty for a ratio.
        values: one of each repeat.
    """

    name: str
    unit: str
    values: Sequence[float]

    def to_dict(self) -> dict[str, Any]:
        """Return median, spread and number of repeats as JSON values."""
        figure: dict[str, Any] = {"name": self.name}
        if self.unit:
            figure["unit"] = self.unit
        return figure | {
            "median": statistics.median(self.values),
            "min": min(self.values),
            "max": max(self.values),
            "n": len(self.values),
        }


@dataclass
class Report:
    """The figures of one benchmark.

    Attributes:
        title: what was measured, on what.
        note: what a reader must know to read the figures right.
    """

    title: str
    note: str = ""
    rows: list[Figure] = field(default_factory=list)
    ratios: list[Figure] = field(default_factory=list)

    def add_row(self, name: str, unit: str, values: Sequence[float]) -> None:
        """Add a measurement."""
        self.rows.append(Figure(name, unit, values))

    def add_ratio(self, name: str, above: Sequence[float], below: Sequence[float]) -> None:
        """Add `above / below`, taken within each repeat."""
        self.ratios.append(Figure(name, "", [a / b for a, b in zip(above, below, strict=True)]))

    def show(self, *, as_json: bool) -> None:
        """Print one JSON object `{machine, commit, rows, ratios}`, or tables for people."""
        machine, commit = describe_machine(), describe_commit()
        if as_json:
            figures = {
                "rows": [row.to_dict() for row in self.rows],
                "ratios": [ratio.to_dict() for ratio in self.ratios],
            }
            print(json.dumps({"machine": machine, "commit": commit} | figures))
            return
        # Into a file or a pipe nothing is cut short.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
        console.print(f"[bold]{self.title}[/bold]")
        console.print(
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
            f"Python {machine['python']}, commit {commit}",
            markup=False,
        )
        if self.note:
            console.print(self.note, markup=False)
        console.print(_table("", self.rows))
        console.print(_table("ratio", self.ratios))


def alternate(contestants: Contestants, repeats: int) -> dict[str, list[float]]:
    """Run all contestants `repeats` times, every second time in reverse; returns the values of each.

    Shows a bar on standard error where that is a terminal.
    """
    values: dict[str, list[float]] = {name: [] for name in contestants}
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=repeats * len(contestants))
        for repeat in range(repeats):
            names = list(contestants)
            for name in names if repeat % 2 == 0 else reversed(names):
                progress.update(task, description=name)
                values[name].append(contestants[name]())
                progress.advance(task)
    return values


def make_parser(description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=repeats, help="default: %(default)s")
    return parser


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on, and nothing that names the machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
    }


def describe_commit() -> str:
    """Return the commit of this checkout, marked where files differ from it; "unknown" outside a checkout."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit}-dirty" if _git("status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _table(title: str, figures: Sequence[Figure]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title, no_wrap=True)
    for heading in ("median", "min - max", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("unit")
    for figure in figures:
        found = figure.to_dict()
        spread = f"{_number(found['min'])} - {_number(found['max'])}"
        table.add_row(figure.name, _number(found["median"]), spread, str(found["n"]), figure.unit)
    return table


def _number(value: float) -> str:
    for scale, suffix in ((1e6, " M"), (1e4, " k")):
        if abs(value) >= scale:
            return f"{value / (1e6 if suffix == ' M' else 1e3):.3g}{suffix}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
