"""Real images and repositories for all tests."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from datasvc.repository import Repository
from datasvc.shards import Dataset, ingest, open_dataset
from tests.samples import write_folder

# A slow machine is no failure: what a property costs is not what its test is about.
settings.register_profile("datasvc", deadline=None)
settings.load_profile("datasvc")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, ROOT / "tools" / "make_digits.py", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def digits(digits_folder, tmp_path_factory) -> Dataset:
    """Data set `digits@1` in a repository that tests share and do not change: 8 training shards."""
    repository = Repository.create(str(tmp_path_factory.mktemp("shared") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return open_dataset(repository, "digits@1")


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository.create(str(tmp_path / "repo"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three classes, 26 images in two splits."""
    return write_folder(tmp_path / "source", {"train": {"a": 7, "b": 5, "c": 8}, "val": {"a": 3, "b": 3}})
