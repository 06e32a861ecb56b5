"""The runner of the benchmarks: arms that run in rounds, measures with their spread, and ratios.

Absolute figures move with the machine and with what else runs on it. So whatever is compared runs side by side: every
round runs all arms, each round in the opposite order of the one before, and a ratio is taken within each round before
the median over the rounds. An arm is a function; it returns one figure, or several by name: seconds, bytes, memory.

A benchmark is a function that `@bench` declares with its options; it returns its `Report`, or yields several.
`python -m tools.bench NAME` runs it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT: Final = Path(__file__).parents[2]
_WIDTH_OF_A_FILE: Final = 160

T = TypeVar("T")
Arms = Mapping[str, Callable[[], T]]
Options = argparse.Namespace


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

    def add_rows(
        self, unit: str, values: Mapping[str, Sequence[float]], convert: Callable[[float], float] = float
    ) -> None:
        """Add a measurement of each arm, whose values become `convert(value)` of `unit`."""
        for name, each in values.items():
            self.add_row(name, unit, [convert(value) for value in each])

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
        console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
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


@dataclass(frozen=True)
class Bench:
    """A benchmark and its options, as `@bench` has declared them."""

    run: Callable[[Options], Report | Iterable[Report]]
    repeats: int
    positional: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any]

    def main(self, name: str, words: Sequence[str]) -> None:
        """Parse `words`, and show the reports. The option `folder` becomes an empty folder, removed at the end."""
        parser = argparse.ArgumentParser(
            prog=f"python -m tools.bench {name}",
            description=inspect.getdoc(self.run),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        common = {
            "repeats": (self.repeats, "rounds"),
            "folder": {"type": Path, "help": "to work in; default: the folder for temporary files"},
        }
        parser.add_argument("--json", action="store_true", help="print one JSON object a report")
        for option, said in (common | self.options).items():
            parser.add_argument(f"--{option.replace('_', '-')}", **_arguments_of(said))
        for argument, said in self.positional.items():
            parser.add_argument(argument, **said)
        options = parser.parse_args(words)
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="datasvc-bench-") as folder:
            options.folder = Path(folder)
            found = self.run(options)
            for report in [found] if isinstance(found, Report) else found:
                report.show(as_json=options.json)


BENCHES: Final[dict[str, Bench]] = {}


def bench(*, repeats: int = 5, positional: Mapping[str, Any] | None = None, **options: Any) -> Callable[[T], T]:
    """Declare a benchmark, by the name of its function.

    Args:
        repeats: default number of rounds.
        positional: arguments by name, each with the keywords of `argparse`.
        options: by name, each a default, a default with its help, or the keywords of `argparse`.
    """

    def declare(run: Any) -> Any:
        BENCHES[run.__name__] = Bench(run, repeats, positional or {}, options)
        return run

    return declare


def _arguments_of(said: Any) -> dict[str, Any]:
    if isinstance(said, dict):
        return said
    default, text = said if isinstance(said, tuple) else (said, "")
    return {"type": type(default), "default": default, "help": f"{text}; default: {default}".removeprefix("; ")}


def turns(arms: Iterable[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield the round and the arm of each turn, every second round in reverse."""
    names = list(arms)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            yield repeat, name


def run_rounds(arms: Arms[T], repeats: int, *, warm_up: bool = False) -> dict[str, list[T]]:
    """Run all arms in each round; returns what each arm has returned, by round.

    Shows a bar on standard error where that is a terminal. With `warm_up`, a round before these does not count.
    """
    if warm_up:
        run_rounds(arms, 1)
    values: dict[str, list[T]] = {name: [] for name in arms}
    for _, name in _shown(turns(arms, repeats), repeats * len(arms)):
        values[name].append(arms[name]())
    return values


def column(results: Iterable[Mapping[str, T]], name: str) -> list[T]:
    """Return one measure of each result."""
    return [result[name] for result in results]


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def rate_of(batches: Iterable[object], size: int) -> float:
    """Return the samples per second of an epoch of batches of `size` samples.

    From its very start: what a loader decodes ahead before its first batch counts, and so does the start of threads.
    """
    began = time.perf_counter()
    num_batches = sum(1 for _ in batches)
    return num_batches * size / (time.perf_counter() - began)


def environment(**more: str) -> dict[str, str]:
    """Return this environment for programs that import this checkout, and packages that only PYTHONPATH names."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def call_command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the command that calls a function of a module here with arguments that JSON has."""
    name = f"{function.__module__}:{function.__name__}"
    return [sys.executable, "-m", "tools.bench", "--call", name, json.dumps(arguments, default=str)]


def call_apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process; returns its value, which JSON has: None if nothing is printed."""
    command = call_command(function, *arguments)
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def launch_command(num_ranks: int) -> list[str]:
    """Return the start of a command that runs the rest of it on some ranks of this machine."""
    return [sys.executable, "-m", "datasvc.trainer.launch", "-np", str(num_ranks), "--no-prefix"]


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, prefix: Sequence[str] = (), **more: str
) -> Iterator[dict[str, Any]]:
    """Call a function on each of some ranks, one thread each; yields the JSON objects that they print.

    Args:
        function: of a module here.
        num_ranks: on this machine.
        arguments: of the function.
        prefix: command that runs the launcher.
        more: variables of the environment.
    """
    command = [*prefix, *launch_command(num_ranks), *call_command(function, *arguments)]
    variables = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **more)
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, _shown(line for line in process.stdout if line.startswith("{")))
    if process.returncode:
        sys.exit(f"the ranks ended with status {process.returncode}")


def _shown(steps: Iterable[T], total: int | None = None) -> Iterator[T]:
    console = Console(stderr=True)
    return iter(track(steps, "rounds", total, console=console, disable=not console.is_terminal, transient=True))


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
