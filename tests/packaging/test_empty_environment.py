"""The wheel in an environment of its own, outside of the sources: the core alone, then with an extra."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

import datasvc
from tests.said import say
from tests.samples import write_folder
from tools.build_release import ROOT

# Above what was measured; any of torch, DALI and nvImageCodec would exceed it.
MAX_BYTES = 450e6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Environment:
    """A virtual environment with a folder to work in."""

    def __init__(self, folder, index):
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        self._index = index
        # Nothing of the tests' own environment: no PYTHONPATH, no DATASVC_ variables.
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LANG", "TMPDIR"))}
        self.variables = {
            **kept,
            "PATH": f"{folder / 'venv/bin'}:/usr/bin:/bin",
            "HOME": str(folder),
            "COLUMNS": "200",
        }
        self.variables |= {"DATASVC_REPO": str(folder / "repo"), "DATASVC_CACHE": str(folder / "cache")}

    def install(self, *packages):
        words = [self.python, "-m", "pip", "install", *self._index, *packages]
        subprocess.run(words, check=True, env=self.variables, cwd=self.folder)

    def run(self, *words):
        words = [self.folder / "venv/bin/datasvc", *words]
        return subprocess.run(words, capture_output=True, text=True, check=False, env=self.variables, cwd=self.folder)

    def said(self, *words):
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def serving(self, *words):
        """Run a server; yields its address, and ends it by a signal."""
        words = [self.folder / "venv/bin/datasvc", *words, "--port", "0", "--json"]
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.variables, cwd=self.folder
        )
        try:
            yield json.loads(process.stdout.readline())["url"]
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def environment(wheel, index, tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    made = Environment(folder, index)
    made.install(wheel)
    write_folder(folder / "photos", {"train": {"a": 4, "b": 4}, "val": {"a": 2}})
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
    (packages,) = (environment.folder / "venv/lib").glob("python*/site-packages")
    names = {path.name.lower() for path in packages.iterdir()}
    assert "datasvc" in names
    assert names.isdisjoint({"torch", "nvidia", "simplejpeg", "cloudpickle", "jinja2", "yaml"})
    core_bytes = size_bytes(packages)
    largest = sorted(((size_bytes(path), path.name) for path in packages.iterdir()), reverse=True)[:6]
    parts = ", ".join(f"{name} {part / 1e6:.0f}" for part, name in largest)
    say(f"the core installs {core_bytes / 1e6:.0f} MB, of which {parts}")
    assert core_bytes < MAX_BYTES


def test_the_core_ingests_stages_queries_and_lists(environment):
    assert environment.said("--version") == f"datasvc {datasvc.__version__}\n"
    assert environment.said("ls").startswith("pets\t1\t10\t")
    assert "samples: 8" in environment.said("show", "pets")
    assert "class: a" in environment.said("head", "pets")
    assert environment.said("sql", "pets", "select count(*) from train") == "8\n"
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


def test_what_the_image_removes_is_not_needed(environment):
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text().replace("\\\n", "")
    (removal,) = re.findall(r"uninstall --yes --quiet setuptools pip\s+&& (.*)", dockerfile)
    removal = removal.replace("/opt/datasvc", str(environment.folder / "venv"))
    subprocess.run(
        ["sh", "-e", "-c", f"{removal}; ! ls $site/pyarrow/include"], check=True, stderr=subprocess.DEVNULL
    )
    (environment.folder / "table.csv").write_text("key,x\na,1\nb,2\n")
    environment.said("ingest", "table.csv", "table")
    environment.said("export", "table", "files", "--format", "parquet")
    environment.said("ingest", "files", "again")
    assert environment.said("sql", "again", "select sum(x) from train") == "3\n"


def test_the_pages_need_one_extra(environment, wheel):
    assert "pip install '.[ui]'" in environment.run("ui").stderr
    environment.install(f"datasvc[ui] @ {wheel.as_uri()}")
    with environment.serving("ui", "--no-browser") as url:
        assert b"pets" in urllib.request.urlopen(url).read()


def test_the_wheel_ingests_stages_and_trains_outside_of_the_sources(installed, tmp_path):
    """With what this environment has installed, torch among it: only the code is that of the wheel."""
    write_folder(tmp_path / "photos", {"train": {"a": 16, "b": 16}, "val": {"a": 4, "b": 4}})
    places = {"DATASVC_REPO": str(tmp_path / "repo"), "DATASVC_CACHE": str(tmp_path / "cache")}
    variables = {**os.environ, **places, "PYTHONPATH": str(installed)}

    def run(*words):
        words = [sys.executable, "-m", "datasvc", *words]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=variables, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("ingest", "photos", "pets")
    run("stage", "pets", "--budget", "10MB")
    run(*["train", "--data", "pets@1", "--name", "net", "--size", "32", "--batch-size", "8", "--epochs", "1"])
    assert json.loads(run("models", "show", "net", "--json"))["step"] == 4
    program = "import datasvc, datasvc.loaders, datasvc.trainer as t; print(datasvc.__file__, t.__file__)"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=variables, cwd=tmp_path)
    assert all(path.startswith(str(installed)) for path in done.stdout.split())
