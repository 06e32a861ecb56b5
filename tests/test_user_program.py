"""A user's program calls every public method of the facade; it runs, and its types are checked by mypy."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.api import DataRepository, Datasets, Models, Runs
from datasvc.models import CheckpointManager
from tests import user_program

ROOT = Path(__file__).parents[1]
SOURCE = Path(user_program.__file__)
# What the calls of the program are made on, as the program writes it.
CLASSES = {
    "repo.datasets": Datasets,
    "repo.models": Models,
    "repo.runs": Runs,
    "repo": DataRepository,
    "manager": CheckpointManager,
}


def facade_calls(tree):
    """Return the calls of the facade's methods, each with what it is called on."""
    return [
        (ast.unparse(node.func.value), node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in {*CLASSES, "datasvc"}
    ]


def test_the_program_calls_every_public_method():
    called = {(owner, call.func.attr) for owner, call in facade_calls(ast.parse(SOURCE.read_text()))}
    public = {
        (owner, name)
        for owner, facade in CLASSES.items()
        for name in dir(facade)
        if not name.startswith("_") and callable(getattr(facade, name))
    }
    # `datasvc.open` is the call of a user for `DataRepository.open`.
    assert called == public - {("repo", "open")} | {("datasvc", "open"), ("datasvc", "ingest")}


@pytest.mark.slow
def test_the_program_runs(tmp_path, folder):
    user_program.main(tmp_path, folder)


def mypy(*paths):
    """Check programs with the settings of the project, which are strict for `user_program*`; return the errors."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, paths)],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return re.findall(r"^(\S+):(\d+): error: (.*)$", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_program_is_well_typed_and_an_unknown_argument_of_any_call_is_an_error(tmp_path):
    tree = ast.parse(SOURCE.read_text())
    for _, call in facade_calls(tree):
        call.keywords.append(ast.keyword("no_such_argument", ast.Constant(0)))
    text = ast.unparse(tree)
    expected = sorted(call.lineno for _, call in facade_calls(ast.parse(text)))
    wrong = tmp_path / "user_program_with_wrong_arguments.py"
    wrong.write_text(text)
    readme = tmp_path / "user_program_of_readme.py"
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    readme.write_text(block)
    errors = mypy(SOURCE, readme, wrong)
    assert [error for error in errors if not error[0].endswith(wrong.name)] == []
    found = sorted(int(line) for _, line, message in errors if "no_such_argument" in message)
    assert found == expected
