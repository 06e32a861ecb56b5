"""A run of tests that must have a package fails where a test skips for the lack of it."""

import re
import subprocess

import pytest

from tests.required import REQUIRED, unmet
from tests.test_imports import ROOT
from tests.test_selection import run_tests

CONFTEST = """
from tests import required
def pytest_configure(config): config.pluginmanager.register(required)
"""
TESTS = """
import pytest
def test_of_a_package(): pytest.importorskip("no_such_package")
@pytest.mark.skipif(True, reason="frame is not installed")
def test_of_a_framework(): pass
def test_of_a_machine(): pytest.skip("no network namespaces here: frame")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "failed"),
    [
        ("", set()),
        ("another", set()),
        ("no_such_package", {"test_of_a_package"}),
        ("another frame", {"test_of_a_framework"}),
    ],
)
def test_a_test_that_skips_for_the_lack_of_something_required_fails(tmp_path, names, failed):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    ran, printed = run_tests(tmp_path, **{REQUIRED: names})
    assert ran == failed, printed


@pytest.mark.slow
def test_a_module_that_skips_for_the_lack_of_something_required_fails(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    assert "1 skipped" in run_tests(tmp_path)[1]
    assert "and the test skips: " in run_tests(tmp_path, **{REQUIRED: "no_such_package"})[1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wandb", "Skipped: could not import 'wandb': No module named 'wandb'"),
        ("mlflow", "Skipped: ['mlflow', 'sqlalchemy'] not installed"),
        ("chromium", "Skipped: needs a browser: Debian's chromium"),
        ("azurite", "Skipped: no Azure Blob Storage: azurite-blob is not in PATH"),
        ("kubernetes-validate", "Skipped: needs kubernetes-validate"),
        ("promtool", "Skipped: needs promtool (package prometheus)"),
        ("slurmctld", "needs Slurm and munge (Debian: slurmctld slurmd slurm-client munge): no slurmd"),
        ("buildah", "Skipped: needs root and the programs mmdebstrap, util-linux buildah ip"),
    ],
)
def test_the_reasons_of_our_tests_are_recognised(name, reason):
    assert unmet(reason, ["ray", name]) == name


def test_what_ci_requires_it_has_tried_to_install():
    script = (ROOT / ".ci/run").read_text()
    subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True)
    named = set(" ".join(re.findall(r"required\+?=\(([^)]*)\)", script)).split())
    assert {"ray", "lightning", "transformers", "mlflow", "wandb", "jax", "keras", "buildah"} <= named
