"""The programs of the pages on migration: all run after the change, and those before it where they can."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from datasvc.repository import Repository
from tests.support import warm_python
from tests.support.doc_blocks import read_blocks, run_blocks
from tests.support.pages import ROOT

# The packages that the programs before the change need.
FOREIGN = {
    "torchvision": [],
    "WebDataset": ["webdataset"],
    "MosaicML Streaming": ["streaming", "transformers"],
    "DALI": ["nvidia.dali"],
    "LitData": ["litdata"],
}
# The last release that is imported without its compiled operations, which ImageFolder and transforms do not need.
# Those of the wheels need the CUDA build of one version of torch.
TORCHVISION = "torchvision==0.16.2"
# What else is imported with MosaicML Streaming, which `make setup` installs without its dependencies.
OF_STREAMING = ("brotli", "catalogue", "cramjam", "python-snappy", "zstd")
PAGES = ["migrate-data.md", "migrate-training.md"]


def program_of(block):
    """Return "after", or what a program before the change was written for, such as "WebDataset"."""
    return re.match(r"# (?:before: )?(.+)\n", block.text)[1]


def programs(page):
    return [block for block in read_blocks(page) if block.language == "python"]


def test_each_program_is_there_before_and_after_the_change():
    found = [program_of(block) for page in PAGES for block in programs(page)]
    assert found == [
        *("torchvision", "after", "WebDataset", "after", "MosaicML Streaming", "after"),
        *("DALI, with the files of MXNet's im2rec", "after"),
        *("LitData, once", "LitData", "LitData, as a source", "after"),
        *("Horovod", "after", "torch.save", "after", "MLflow", "after"),
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_program_is_valid_python(page):
    for block in programs(page):
        compile(block.text, block.place, "exec")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder in which the commands and the programs after the change have run, those of the pages on data."""
    folder = tmp_path_factory.mktemp("migration")
    blocks = [block for block in read_blocks("migrate-data.md") if block.language in {"sh", "python"}]
    run_blocks([block for block in blocks if block.language == "sh" or program_of(block) == "after"], folder)
    return folder


@pytest.mark.slow
def test_the_programs_on_data_run_after_the_change(data):
    repository = Repository.open(str(data / "repo"))
    assert repository.names("datasets") == ["digits", "digits-lit", "records", "shards", "tars"]


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """A folder with packages that would disturb other tests, and without what they depend on, which is installed."""
    folder = tmp_path_factory.mktemp("added")
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--target",
        folder,
    ]
    if subprocess.run([*words, TORCHVISION, *OF_STREAMING], capture_output=True, check=False).returncode:
        pytest.skip(f"{TORCHVISION} cannot be installed: no package index, or no wheel for this Python")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision", "WebDataset", "MosaicML Streaming", "DALI", "LitData"])
def test_a_program_on_data_runs_before_the_change(name, data, added):
    missing = [package for package in FOREIGN[name] if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing} not installed")
    blocks = [block for block in programs("migrate-data.md") if program_of(block).partition(",")[0] == name]
    run_blocks(blocks, data, PYTHONPATH=f"{ROOT}:{added}")


@pytest.mark.slow
def test_the_programs_on_checkpoints_run_before_and_after_the_change(tmp_path):
    blocks = [block for block in read_blocks("migrate-training.md") if block.language in {"sh", "python"}]
    names = ["torch.save", "after", *(["MLflow"] if find_spec("mlflow") else [])]
    chosen = [block for block in blocks if block.language == "sh" or program_of(block) in names]
    run_blocks([block for block in chosen if "hvd" not in block.text], tmp_path)
    repository = Repository.open(str(tmp_path / "repo"))
    assert repository.living("models", "net") == [1, 2, 3]
    assert repository.tags("models", "regressor") == {"prod": 1}
    assert repository.living("models", "old-net") == [1]
    assert (tmp_path / "exported" / "checkpoint.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_program_for_horovod_runs_on_two_ranks_before_and_after_the_change(number, tmp_path, monkeypatch):
    program = tmp_path / "train.py"
    program.write_text(programs("migrate-training.md")[number].text)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tools' / 'horovod_compat'}:{ROOT}")
    launcher = [sys.executable, "-m", "datasvc.trainer.launch", "-np", "2", "--no-prefix"]
    words = [*launcher, warm_python.command(), program]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert float(re.fullmatch(r"loss (\S+)\n", done.stdout)[1]) < 8
