"""Packages and servers that a run of tests must have: a test that skips for the lack of one fails.

`.ci/run` names in `DATASVC_TEST_REQUIRED` what it has installed, so that a green run has tested against the real one.
What could not be installed is not named, and the end of `.ci/run` says so.
"""

import os
import re

import pytest

REQUIRED = "DATASVC_TEST_REQUIRED"
# How a test says that something is missing, where its reason does not have the name.
REASONS = {
    "azurite": "no Azure Blob Storage",
    "gcp-storage-emulator": "no Google Cloud Storage",
    "kubernetes-validate": "kubernetes_validate|kubernetes-validate",
}
# Such as "could not import 'wandb'", "lightning is not installed" or "needs a browser: Debian's chromium".
_IS_MISSING = re.compile(r"could not import|not installed|needs |no (Azure|Google)")


def pytest_configure(config):
    config.required = tuple(os.environ.get(REQUIRED, "").split())


def unmet(reason, required):
    """Return which of the required names a reason of a skip says to be missing; None: none of them."""
    if not _IS_MISSING.search(reason):
        return None
    return next((name for name in required if re.search(rf"(?<!\w)({REASONS.get(name, name)})(?!\w)", reason)), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _judged((yield), item.config.required)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _judged((yield), collector.config.required)


def _judged(report, required):
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
        if name := unmet(reason, required):
            report.outcome, report.longrepr = "failed", f"{REQUIRED} has {name}, and the test skips: {reason}"
    return report
