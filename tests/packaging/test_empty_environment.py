"""The wheel in environments of their own, outside of the sources: the core alone, with extras, on each Python."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

import datasvc
from tests.packaging.chroots import enter, make_system, need_chroots, pip_options
from tests.said import say
from tests.samples import write_folder
from tools.build_release import ROOT

# Above what was measured; any of DuckDB, torch, DALI and nvImageCodec would exceed it.
MAX_BYTES = 376e6
OTHER_PYTHONS = [f"3.{minor}" for minor in range(11, 15) if minor != sys.version_info.minor]
NEWEST = {"3.14": "forky"}  # in the release of Debian that has it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Environment:
    """A virtual environment with a folder to work in.

    Args:
        folder: this folder.
        wheel: the wheel; it is copied into the folder.
        index: options of pip.
        python: interpreter.
        root: the system that the interpreter belongs to; the folder is in it.
    """

    def __init__(self, folder, wheel, index, python=sys.executable, root=Path("/")):
        self.folder = folder
        self._root = root
        self._index = [*index, "--constraint", "constraints.txt"]
        inside = Path("/", folder.relative_to(root))
        self._bin = inside / "venv" / "bin"
        self._wheel = inside / wheel.name
        folder.mkdir(exist_ok=True)
        shutil.copy(wheel, folder)
        shutil.copy(ROOT / "constraints.txt", folder)
        # Nothing of the tests' own environment: no PYTHONPATH, no DATASVC_ variables.
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LANG", "TMPDIR"))}
        self._variables = {
            **(kept if root == Path("/") else {}),
            "PATH": f"{self._bin}:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(inside),
            "COLUMNS": "200",
            "DATASVC_REPO": str(inside / "repo"),
            "DATASVC_CACHE": str(inside / "cache"),
        }
        subprocess.run(self._words(python, "-m", "venv", inside / "venv"), check=True, **self._place)

    @property
    def packages(self):
        (found,) = (self.folder / "venv/lib").glob("python*/site-packages")
        return found

    def install(self, extra=None):
        """Install the wheel, with an extra or without."""
        wheel = self._wheel if extra is None else f"datasvc[{extra}] @ {self._wheel.as_uri()}"
        words = self._words(self._bin / "python", "-m", "pip", "install", *self._index, wheel)
        subprocess.run(words, check=True, **self._place)

    def run(self, *words, program="datasvc"):
        words = self._words(self._bin / program, *words)
        return subprocess.run(words, capture_output=True, text=True, check=False, **self._place)

    def said(self, *words, program="datasvc"):
        done = self.run(*words, program=program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def serving(self, *words):
        """Run a server; yields its address, and ends it by a signal."""
        words = self._words(self._bin / "datasvc", *words, "--port", "0", "--json")
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **self._place)
        try:
            yield json.loads(process.stdout.readline())["url"]
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    @property
    def _place(self):
        return {"env": self._variables, "cwd": self.folder}

    def _words(self, *words):
        if self._root == Path("/"):
            return words
        return enter(self._root, *words, variables=self._variables, folder=self._variables["HOME"])


@pytest.fixture(scope="module")
def environment(wheel, index, tmp_path_factory):
    made = Environment(tmp_path_factory.mktemp("empty"), wheel, index)
    made.install()
    write_folder(made.folder / "photos", {"train": {"a": 4, "b": 4}, "val": {"a": 2}})
    made.said("ingest", "photos", "pets")
    return made


def size_bytes(folder):
    return sum(
        os.lstat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(folder)
        for name in names
        if not re.search(r"/site-packages/(pip|setuptools|_distutils_hack|pkg_resources)\b", parent)
    )


def test_the_core_is_small(environment):
    packages = environment.packages
    names = {path.name.lower() for path in packages.iterdir()}
    assert "datasvc" in names
    assert names.isdisjoint({"torch", "nvidia", "duckdb", "simplejpeg", "cloudpickle", "jinja2", "yaml"})
    core_bytes = size_bytes(packages)
    code_bytes = core_bytes - sum(path.stat().st_size for path in packages.rglob("*.pyc"))
    largest = sorted(((size_bytes(path), path.name) for path in packages.iterdir()), reverse=True)[:6]
    parts = ", ".join(f"{name} {part / 1e6:.0f}" for part, name in largest)
    say(f"the core installs {core_bytes / 1e6:.0f} MB, {code_bytes / 1e6:.0f} without byte code, of which {parts}")
    assert core_bytes < MAX_BYTES


def test_the_core_ingests_stages_and_lists(environment):
    assert environment.said("--version") == f"datasvc {datasvc.__version__}\n"
    assert environment.said("ls").splitlines()[1].startswith("pets\t1\t10\t")
    assert "samples: 8" in environment.said("show", "pets")
    assert "class: a" in environment.said("head", "pets")
    assert "1 shard fetched" in environment.said("stage", "pets", "--split", "train", "--budget", "10MB")
    assert environment.said("models", "ls", "--json") == "[]\n"
    assert '"problems": 0' in environment.said("doctor", "--json")


def test_the_core_serves_a_node(environment):
    with environment.serving("serve", "--budget", "10MB") as url:
        assert json.load(urllib.request.urlopen(f"{url}/healthz")) == {"status": "ok"}


@pytest.mark.parametrize(
    ("words", "reason", "extra"),
    [
        (["train", "--data", "pets", "--name", "n"], "this command needs torch", "torch"),
        (["sql", "pets", "select 1"], "a query in SQL needs duckdb", "sql"),
        (["ingest", "photos", "cats", "--decode-check"], "a decode check of JPEG files needs simplejpeg", "images"),
        (["ls", "--repo", "s3://bucket/repo"], "s3fs", "s3"),
    ],
)
def test_what_needs_an_extra_says_which(environment, words, reason, extra):
    done = environment.run(*words)
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stderr.count("pip install '.[") == done.stderr.count(f"pip install '.[{extra}]'") == 1
    assert "Traceback" not in done.stderr


def test_the_pages_and_sql_need_one_extra(environment):
    assert "pip install '.[ui]'" in environment.run("ui").stderr
    environment.install("ui")
    with environment.serving("ui", "--no-browser") as url:
        assert b"pets" in urllib.request.urlopen(url).read()
    assert environment.said("sql", "pets", "select count(*) from train") == "count_star()\n8\n"


def test_a_training_runs_in_an_environment_of_its_own(wheel, index, tmp_path):
    environment = Environment(tmp_path / "empty", wheel, index)
    environment.install("train")
    write_folder(environment.folder / "photos", {"train": {"a": 16, "b": 16}, "val": {"a": 4, "b": 4}})
    environment.said("ingest", "photos", "pets")
    environment.said("stage", "pets", "--budget", "10MB")
    size = ("--size", "32", "--batch-size", "8", "--epochs", "1")
    environment.said("train", "--data", "pets@1", "--name", "net", *size)
    assert json.loads(environment.said("models", "show", "net", "--json"))["step"] == 4
    program = (
        "import datasvc.loaders, datasvc.trainer as t, torch; print(datasvc.__file__, t.__file__, torch.__file__)"
    )
    files = environment.said("-c", program, program="python").split()
    assert [file for file in files if not file.startswith(str(environment.packages))] == []


@pytest.fixture
def other_environment(request, wheel, index, tmp_path_factory):
    """An environment of another Python: an installed one, else that of the release of Debian that has it."""
    version = request.param
    folder = tmp_path_factory.mktemp("other")
    if python := find_python(version):
        return Environment(folder / "work", wheel, index, python)
    if version not in NEWEST:
        pytest.skip(f"Python {version} is not installed")
    need_chroots()
    root = folder / "root"
    make_system(NEWEST[version], root, "ca-certificates", "python3-venv")
    shutil.copy("/etc/resolv.conf", root / "etc")
    for option, value in pip_options().items():
        target = root / "run" / option
        shutil.copy(value, target) if option == "cert" else None
        index = [*index, f"--{option}", f"/run/{option}" if option == "cert" else value]
    return Environment(root / "work", wheel, index, f"python{version}", root)


def find_python(version):
    """Return an interpreter of a version that runs, on PATH or of pyenv; None if there is none."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (shutil.which(f"python{version}"), *sorted(of_pyenv.glob(f"{version}.*/bin/python"))):
        # pyenv has a program for each name, which fails if that version is not selected.
        if found and not subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode:
            return found
    return None


@pytest.mark.long
@pytest.mark.parametrize("other_environment", OTHER_PYTHONS, indirect=True)
def test_the_core_runs_on_another_python(other_environment, request):
    environment = other_environment
    version = request.node.callspec.params["other_environment"]
    assert environment.said("--version", program="python").startswith(f"Python {version}.")
    environment.install()
    write_folder(environment.folder / "photos", {"train": {"a": 4, "b": 4}, "val": {"a": 2}})
    environment.said("ingest", "photos", "pets")
    assert "1 shard fetched" in environment.said("stage", "pets", "--split", "train", "--budget", "10MB")
    environment.said("verify", "pets", "--deep")
    with environment.serving("serve", "--budget", "10MB") as url:
        assert json.load(urllib.request.urlopen(f"{url}/healthz")) == {"status": "ok"}
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert f"Programming Language :: Python :: {version}" in classifiers
