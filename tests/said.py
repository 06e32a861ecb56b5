"""Lines for the end of a test run, whichever process of it had something to say."""

from collections import Counter

import pytest

_lines: dict[str, None] = {}


def say(line):
    """Keep a line for the end of the run; said twice, it is printed once."""
    _lines[line] = None


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["said"] = list(_lines)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for line in getattr(node, "workeroutput", {}).get("said", ()):
        say(line)


def pytest_terminal_summary(terminalreporter):
    for line in _lines:
        terminalreporter.write_line(line)
    # One line each, not one for each test: a reader of the log sees what this machine could not show.
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason.removeprefix('Skipped: ')}")
