"""The package name `horovod`: what it is, what it refuses, and that it leaves the real one alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "tools" / "horovod_compat"


def run(*arguments, cwd, folders=(COMPAT, ROOT), **variables):
    path = os.pathsep.join(map(str, folders))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write_real_horovod(folder):
    """As pip would leave the real one."""
    (folder / "horovod").mkdir(parents=True)
    (folder / "horovod" / "__init__.py").write_text("IS_REAL = True\n")
    (folder / "horovod-0.28.1.dist-info").mkdir()
    (folder / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    return folder


@pytest.mark.slow
def test_its_modules_are_the_trainer_s_own(tmp_path):
    program = """
import sys
import horovod
from horovod.common.exceptions import HorovodInternalError
assert horovod.run and horovod.__version__ == "0.28.1"
assert "torch" not in sys.modules
import importlib
for name in horovod._MODULES:
    importlib.import_module(name)
import horovod.torch as hvd
from datasvc import trainer
assert hvd is trainer and hvd.mpi_ops is trainer.mpi_ops is sys.modules["horovod.torch.mpi_ops"]
assert horovod.torch.elastic.sampler is trainer.elastic.sampler
assert HorovodInternalError is hvd.HorovodInternalError
assert trainer.__name__ == trainer.__spec__.name == "datasvc.trainer"
"""
    done = run("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["horovod.tensorflow.keras", "horovod.run.runner", "horovod.torch.launch"])
def test_other_modules_of_horovod_are_refused_with_what_there_is(tmp_path, module):
    done = run("-c", f"import {module}", cwd=tmp_path)
    missing = ".".join(module.split(".")[:2]) if "torch" not in module.split(".") else module
    assert f"ModuleNotFoundError: there is no {missing} here: this horovod is datasvc's trainer" in done.stderr
    assert "horovod.torch.mpi_ops" in done.stderr


def test_a_module_that_is_not_there_is_not_run_either(tmp_path):
    done = run("-m", "horovod.tensorflow", cwd=tmp_path)
    assert "there is no horovod.tensorflow here" in done.stderr


def test_a_program_may_look_for_other_modules_without_an_error(tmp_path):
    program = """
import importlib.util, horovod
for name in ("horovod.tensorflow", "horovod.keras", "horovod.spark", "horovod.torch.mpi_lib"):
    spec = importlib.util.find_spec(name)
    if spec is not None:
        try:
            importlib.util.module_from_spec(spec)
        except ModuleNotFoundError as error:
            assert str(error).startswith(f"there is no {name} here") and error.name == name
        else:
            raise AssertionError(name)
"""
    done = run("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_horovodrun_is_the_launcher(tmp_path):
    done = run("-m", "horovod.runner.launch", "-np", "1", "echo", "started", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_without_the_trainer_it_says_what_to_install(tmp_path):
    done = run("-S", "-c", "import horovod", cwd=tmp_path, folders=[COMPAT])
    assert "ImportError" in done.stderr
    assert "there is no trainer: install datasvc" in done.stderr


def test_beside_the_real_one_the_real_one_is_imported_and_found_first_it_names_both(tmp_path):
    both = write_real_horovod(tmp_path / "both")
    shutil.copy(COMPAT / "horovod.py", both)
    program = "import horovod; print(horovod.IS_REAL)"
    assert run("-c", program, cwd=tmp_path, folders=[both, ROOT]).stdout == "True\n"
    done = run("-c", program, cwd=tmp_path, folders=[COMPAT, both, ROOT])
    assert f"two packages are imported as horovod: Horovod 0.28.1 in {both}" in done.stderr
    assert "pip uninstall horovod" in done.stderr


@pytest.fixture
def source(tmp_path):
    """A copy, because a build leaves files beside what it builds."""
    return shutil.copytree(COMPAT, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__*"))


def test_it_refuses_to_be_built_for_an_environment_that_has_the_real_one(source, tmp_path):
    pytest.importorskip("setuptools")
    user = write_real_horovod(
        tmp_path / "user" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    )
    program = "import setuptools.build_meta as backend; backend.get_requires_for_build_wheel()"
    done = run("-c", program, cwd=source, folders=[], PYTHONUSERBASE=str(tmp_path / "user"))
    assert done.returncode == 1
    assert f"cannot install datasvc-horovod: Horovod 0.28.1 is in {user}" in done.stderr
    assert run("-c", program, cwd=source, folders=[], PYTHONUSERBASE=str(tmp_path)).returncode == 0


@pytest.mark.slow
def test_what_pip_installs_is_one_module_and_horovodrun(source, tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--target", tmp_path / "target"]
    done = run("-m", "pip", "install", *options, source, cwd=tmp_path, folders=[])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "horovod.py").read_bytes() == (COMPAT / "horovod.py").read_bytes()
    assert not (tmp_path / "target" / "horovod").exists()
    script = tmp_path / "target" / "bin" / "horovodrun"
    done = run(script, "-np", "1", "echo", "started", cwd=tmp_path, folders=[tmp_path / "target", ROOT])
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
