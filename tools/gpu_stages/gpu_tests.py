"""`pytest -m gpu`: every test that needs a GPU, in a worker that is replaced should a driver end it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from report import ROOT

from gpu_stages.stage import Stage

MARKS: Final = ("mark.gpu", "tests.devices")
_MAX_NAMED: Final = 10


def run(stage: Stage) -> None:
    """Run the tests; those that are skipped, fail or end the process are counted and named."""
    with stage.timed("tests"):
        results = stage.folder / "junit.xml"
        # fmt: off
        stage.run(
            "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "-rfEs", "--timeout=200",
            # A crash in a driver then fails one test, and not the day.
            *(("-n", "1") if stage.has_gpu else ("-p", "no:xdist")),
            f"--junitxml={results}", f"--basetemp={stage.folder / 'tests'}", *find_test_files(ROOT / "tests"),
            check=False,
        )
        # fmt: on
        counts, failed = read_results(results)
        for outcome, count in counts.items():
            stage.report.add_row(outcome, "tests", [count])
    if failed:
        more = f" and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        sys.exit(f"{len(failed)} tests failed: {', '.join(failed[:_MAX_NAMED])}{more}")
    if not counts["passed"] and not counts["skipped"]:
        sys.exit("no test was collected; the log says why")
    stage.need_gpu(f"{counts['skipped']} tests were collected and skipped")


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
