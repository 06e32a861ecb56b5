"""How the program is started: its version, `python -m datasvc`, and completion in shells."""

import os
import subprocess
import sys
import tomllib

import pytest

import datasvc
from tests.cli.command import ROOT, run, run_apart


def test_the_version_is_that_of_the_package_and_stands_in_one_place():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"datasvc {datasvc.__version__}\n")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "datasvc.__version__"}


def test_the_module_is_the_program(tmp_path):
    words = [sys.executable, "-m", "datasvc", "ls", "--repo", tmp_path / "missing"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == run("ls", "--repo", tmp_path / "missing").stderr


@pytest.mark.slow
def test_a_command_after_two_dashes_has_its_options(tmp_path):
    # In a process where no command has options yet: they stay.
    said = run_apart("--", "samples", "pets", "--max-shards", "3", "--repo", tmp_path / "missing").stderr
    assert "no repository at" in said


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("datasvc hist", ["histogram"]),
        ("datasvc sample", ["samples", "sample"]),
        ("datasvc models restor", ["restore"]),
        ("datasvc ls --js", ["--json"]),
    ],
)
def test_a_shell_completes_commands_and_options(words, completed):
    position = len(words.split()) - 1
    done = run(COMP_WORDS=words, COMP_CWORD=position, _DATASVC_COMPLETE="complete_bash")
    assert (done.returncode, done.stdout.split()) == (0, completed)


@pytest.mark.slow
def test_the_script_of_a_shell_is_for_the_name_of_the_program_however_it_was_started():
    variables = {**os.environ, "_DATASVC_COMPLETE": "source_bash"}
    words = [sys.executable, "-m", "datasvc"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=variables)
    assert done.stdout.strip().endswith("complete -o default -F _datasvc_completion datasvc")


def test_the_page_on_installing_names_what_installs_completion():
    shown = run("--help").stdout
    page = (ROOT / "docs/how-to/install.md").read_text()
    for option in ("--version", "--install-completion", "--show-completion"):
        assert option in shown
        assert f"datasvc {option}" in page
