"""`pytest -m gpu`: every test that needs a GPU, in a worker that is replaced should a driver end it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from gpu_stages.stage import Stage
from tools.bench.runner import ROOT, Figure

MARKS: Final = ("mark.gpu", "tests.support.devices")
# Windows of JPEGs on a GPU are reported to end the process: their tests come last, and spend few workers.
RUNS: Final = (("", "not gpu-window", 20), ("gpu-window, ", "gpu-window", 3))
OUTCOMES: Final = ("passed", "failed", "skipped")
FILES_PER_RUN: Final = 5
_MAX_NAMED: Final = 10


def run(stage: Stage) -> None:
    """Run the tests; those that are skipped, fail or end the process are counted and named."""
    failed, counts, files = [], {}, find_test_files(ROOT / "tests")
    for prefix, chosen, num_restarts in stage.choose(RUNS, RUNS[:1]):
        # A crash in a driver fails one test, and its worker is replaced.
        workers = ("-n", 1, "--max-worker-restart", num_restarts) if stage.has_gpu else ("-p", "no:xdist")
        counts = dict.fromkeys(OUTCOMES, 0)
        kept = stage.report.rows
        for start in range(0, len(files), FILES_PER_RUN):
            part = files[start : start + FILES_PER_RUN]
            with stage.timed(f"tests of {part[0].name} and the next, {chosen}"):
                run_part = partial(run_tests, stage, part, "-k", chosen, *workers)
                found, names = stage.once(f"{chosen}, {part[0]}", run_part)
                counts = {outcome: count + found[outcome] for outcome, count in counts.items()}
                # A stage that is ended keeps what it has.
                stage.report.rows = [*kept, *(Figure(f"{prefix}{name}", "tests", [n]) for name, n in counts.items())]
                failed += names
        if not any(counts.values()):
            sys.exit("no test was collected; the log says why")
    if failed:
        more = f" and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        sys.exit(f"{len(failed)} tests failed: {', '.join(failed[:_MAX_NAMED])}{more}")
    stage.need_gpu(f"{counts['skipped']} tests were collected and skipped")


def run_tests(stage: Stage, files: Sequence[Path], *options: Any) -> tuple[dict[str, int], list[str]]:
    """Run pytest on what is marked gpu in files; returns the tests by outcome, and the names of those that failed."""
    results = stage.folder / "junit.xml"
    results.unlink(missing_ok=True)
    # fmt: off
    stage.run(
        "-m", "pytest", "-m", "gpu", *options, "-p", "no:cacheprovider", "--tb=short", "-rfEs", "--timeout=120",
        "--timeout-method=thread",  # a signal is not heeded inside a driver
        f"--junitxml={results}", f"--basetemp={stage.folder / 'tests'}", *files,
        check=False,
    )
    # fmt: on
    return read_results(results)


def find_test_files(tests: Path) -> list[Path]:
    """Return the files with tests for a GPU; others need not import on a machine that has little installed."""
    files = sorted(tests.rglob("test_*.py"))
    return [path for path in files if any(mark in path.read_text(encoding="utf-8") for mark in MARKS)]


def read_results(path: Path) -> tuple[dict[str, int], list[str]]:
    """Return the number of tests by outcome, and the names of those that failed."""
    counts, failed = dict.fromkeys(OUTCOMES, 0), []
    for case in ET.parse(path).getroot().iter("testcase") if path.exists() else ():  # noqa: S314 - our own
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed
