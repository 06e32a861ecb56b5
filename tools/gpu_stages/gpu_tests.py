"""`pytest -m gpu`: every test that needs a GPU, in a worker that is replaced should a driver end it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from report import ROOT

from gpu_stages.stage import Stage

MARKS: Final = ("mark.gpu", "tests.devices")
# Windows of JPEGs on a GPU are reported to end the process: their tests come last, and spend few workers.
RUNS: Final = (("", "not gpu-window", 20), ("gpu-window, ", "gpu-window", 3))
_MAX_NAMED: Final = 10


def run(stage: Stage) -> None:
    """Run the tests; those that are skipped, fail or end the process are counted and named."""
    failed, counts = [], {}
    for prefix, chosen, num_restarts in stage.choose(RUNS, RUNS[:1]):
        with stage.timed(f"tests, {chosen}"):
            # A crash in a driver fails one test, and its worker is replaced.
            workers = ("-n", 1, "--max-worker-restart", num_restarts) if stage.has_gpu else ("-p", "no:xdist")
            counts, names = run_tests(stage, "-k", chosen, *workers)
            for outcome, count in counts.items():
                stage.report.add_row(f"{prefix}{outcome}", "tests", [count])
            failed += names
    if failed:
        more = f" and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        sys.exit(f"{len(failed)} tests failed: {', '.join(failed[:_MAX_NAMED])}{more}")
    stage.need_gpu(f"{counts['skipped']} tests were collected and skipped")


def run_tests(stage: Stage, *options: Any) -> tuple[dict[str, int], list[str]]:
    """Run pytest on what is marked gpu; returns the tests by outcome, and the names of those that failed."""
    results = stage.folder / "junit.xml"
    results.unlink(missing_ok=True)
    # fmt: off
    stage.run(
        "-m", "pytest", "-m", "gpu", *options, "-p", "no:cacheprovider", "--tb=short", "-rfEs", "--timeout=120",
        "--timeout-method=thread",  # a signal is not heeded inside a driver
        f"--junitxml={results}", f"--basetemp={stage.folder / 'tests'}", *find_test_files(ROOT / "tests"),
        check=False,
    )
    # fmt: on
    counts, failed = read_results(results)
    if not any(counts.values()):
        sys.exit("no test was collected; the log says why")
    return counts, failed


def find_test_files(tests: Path) -> list[Path]:
    """Return the files with tests for a GPU; others need not import on a machine that has little installed."""
    files = sorted(tests.rglob("test_*.py"))
    return [path for path in files if any(mark in path.read_text(encoding="utf-8") for mark in MARKS)]


def read_results(path: Path) -> tuple[dict[str, int], list[str]]:
    """Return the number of tests by outcome, and the names of those that failed."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ET.parse(path).getroot().iter("testcase") if path.exists() else ():  # noqa: S314 - our own
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed
