"""What a second run of tests leaves out, and what it may not."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.selection import AGAIN, DISK, ON_DISK, PASSED, RECORD, folder_of
from tests.test_imports import ROOT

TESTS = """
import os
import pytest
from hypothesis import given, strategies as st

def test_plain(): assert not {"DATASVC_TEST_RECORD", "DATASVC_TEST_PASSED"} & set(os.environ)
def test_that_fails(): assert os.environ.get("NOW")
def test_that_skips():
    if not os.environ.get("NOW"): pytest.skip("not there")
@given(st.booleans())
def test_of_a_law(_): pass
@pytest.fixture
def s3_bucket(): return "s3://bucket"
@pytest.fixture
def repo(s3_bucket): return s3_bucket
def test_on_a_server(repo): pass
@pytest.fixture
def broken_at_its_end():
    yield
    assert os.environ.get("NOW")
def test_with_a_bad_end(broken_at_its_end): pass
@pytest.mark.slow
def test_new_here(): pass
@pytest.fixture
def browser(): return None
def test_of_a_page(browser): pass
"""
CONFTEST = """
from tests import selection
from tests.said import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa
def pytest_configure(config): config.pluginmanager.register(selection)
"""


def run_tests(folder, *options, **environment):
    """Run the tests in a folder; returns the names of those that ran."""
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    return set(re.findall(r"^(?:PASSED|FAILED|ERROR) test_it.py::(\w+)", done.stdout, re.MULTILINE)), done.stdout


@pytest.mark.slow
def test_a_second_run_leaves_out_what_passed_and_cannot_differ(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: in the second run only\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    ran, printed = run_tests(tmp_path, "-m", "not slow", **{RECORD: str(tmp_path / "passed")})
    assert "left out" not in printed
    assert not ran & {"test_new_here", "test_of_a_page"}
    ran, printed = run_tests(tmp_path, "-n", "1", NOW="1", **{PASSED: str(tmp_path / "passed")})
    assert ran == set(re.findall(r"def (test_\w+)", TESTS)) - {"test_plain"}, printed
    assert "left out 1 tests" in printed


def test_the_rooms_that_run_again_and_those_on_the_disk_exist():
    assert [name for name in AGAIN + ON_DISK if not (ROOT / name).exists()] == []


def test_a_room_that_depends_on_the_file_system_has_its_files_on_the_disk(tmp_path, monkeypatch):
    here, there = (SimpleNamespace(nodeid=f"tests/{name}.py::test_it") for name in ("test_durable", "test_sizes"))
    monkeypatch.delenv(DISK, raising=False)
    with folder_of(here, tmp_path) as folder:
        assert folder == tmp_path
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv(DISK, str(tmp_path / "disk"))
    with folder_of(here, tmp_path) as folder:
        assert folder.parent == tmp_path / "disk"
    with folder_of(there, tmp_path) as folder:
        assert folder == tmp_path
    assert list((tmp_path / "disk").iterdir()) == []
