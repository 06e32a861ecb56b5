"""What is installed: one top-level package; a program may have a `trainer.py` and `loaders/` of its own beside it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import loaders, trainer
assert (loaders.WHOSE, trainer.WHOSE) == ("mine", "mine")
import datasvc.trainer as hvd
from datasvc.loaders import ImageLoader
from datasvc.shards import ingest

hvd.init()
print(hvd.size(), ImageLoader.__module__, hvd.__file__)
hvd.shutdown()
"""
TYPED = """
import datasvc.trainer as hvd
from datasvc.loaders import TokenLoader

size: int = hvd.size()
loader: TokenLoader = "none"
"""

pytestmark = pytest.mark.slow


def test_its_only_top_level_name_is_datasvc(wheel):
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"datasvc"}


def test_it_holds_every_module(wheel):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "datasvc").rglob("*.py")}
    for folder in ("loaders", "trainer"):
        modules |= {f"datasvc/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")} == modules


@pytest.fixture
def program(tmp_path) -> Path:
    """A program in a folder with modules named as our folders are."""
    (tmp_path / "loaders").mkdir()
    (tmp_path / "loaders" / "__init__.py").write_text('WHOSE = "mine"\n')
    (tmp_path / "trainer.py").write_text('WHOSE = "mine"\n')
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_a_program_beside_its_own_trainer_and_loaders_runs_on_the_wheel(program, installed):
    done = run(program, PYTHONPATH=str(installed))
    assert done.stdout == f"1 datasvc.loaders.images.image_loader {installed}/datasvc/trainer/__init__.py\n"


def test_a_program_beside_its_own_trainer_and_loaders_runs_on_the_editable_install(program):
    done = run(program, PYTHONPATH="")
    assert done.stdout.startswith("1 datasvc.loaders.images.image_loader ")


def run(program: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_type_checker_finds_the_types(tmp_path, installed):
    (tmp_path / "typed.py").write_text(TYPED)
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "--config-file", "", "typed.py"]
    for package in (installed, ROOT):  # the second run takes torch's types from the cache of the first one
        variables = {**os.environ, "MYPYPATH": str(package)}
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=variables)
        assert "typed.py:6: error: Incompatible types in assignment" in done.stdout, done.stdout
        assert done.stdout.count("typed.py:") == 1
