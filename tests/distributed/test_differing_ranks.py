"""A job whose ranks are not replicas of each other ends before its first step, with the ranks and their values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
# The training program, as rank 1 with other options, each with one value, or in another folder.
PROGRAM = """
import os, sys
folder, *options = sys.argv.pop(1).split()
if os.environ["RANK"] == "1":
    os.chdir(folder)
    for name, *value in (option.split("=", 1) for option in options):
        place = sys.argv.index(name) if name in sys.argv else len(sys.argv)
        sys.argv[place : place + 2] = [name, *value]
from datasvc.trainer.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def url(digits_folder, tmp_path_factory):
    url = str(tmp_path_factory.mktemp("differing") / "repo")
    ingest(Repository.create(url), str(digits_folder), "digits", limit=96)
    return url


def refuse(url, folder, *added, cwd=ROOT):
    """Run two ranks, each as the first of its host; return the message that ends the job."""
    # fmt: off
    words = [
        sys.executable, "-m", "datasvc.trainer.launch", "-H", "localhost:1,127.0.0.1:1",
        warm_python.command(), "-c", PROGRAM, " ".join([str(folder), *added]),
        "--data", "digits@1", "--repo", url, "--name", "refused", "--size", "16", "--batch-size", "8",
    ]
    # fmt: on
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environ, check=False)
    assert done.returncode == 2, done.stderr
    assert '"event": "step"' not in done.stdout
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("added", "message"),
    [
        (["--batch-size=4", "--seed=3"], "seed: rank 0 has 0, rank 1 has 3; they also differ in batch_size"),
        (["--elastic"], "differ in elastic: rank 0 has false, rank 1 has true"),
        (["--layout=shard=2"], 'differ in layout: rank 0 has null, rank 1 has "shard=2"'),
        (["--data=digits@2"], 'differ in data: rank 0 has "digits@1", rank 1 has "digits@2"'),
    ],
    ids=["batch", "elastic", "layout", "data"],
)  # fmt: skip
def test_other_options_are_refused(url, added, message):
    assert message in refuse(url, ROOT, *added)


@pytest.mark.slow
def test_other_code_is_refused(url, tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", folder.name], check=True)
    words = ["git", "-C", str(folders[1]), "rev-parse", "HEAD"]
    commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    assert f'rank 1 has "{commit}"' in refuse(url, folders[1], cwd=folders[0])


@pytest.mark.slow
def test_a_repository_with_other_data_of_the_same_name_is_refused(url, digits_folder, tmp_path):
    other = tmp_path / "repo"
    ingest(Repository.create(str(other)), str(digits_folder), "digits", limit=90)
    assert "differ in the data of digits@1, split 'train'" in refuse(url, ROOT, f"--repo={other}")
