"""Two hosts that share a network, but not their folders: mount namespaces with disks of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import datasvc
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.support.ports import reserved_ports

pytestmark = pytest.mark.slow  # programs of several ranks, each of which loads torch

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--data digits --size 16 --scale 0.8 1 --batch-size 8 --epochs 1 --learning-rate 0.02 --name net --resume auto"
)
# Mounts disks of its own (MOUNTS: pairs of a folder or "tmpfs", and where it appears), then becomes the rank.
ON_HOST = """
set -e
mount --make-rprivate /
for pair in $MOUNTS; do
  case $pair in tmpfs=*) mount -t tmpfs tmpfs "${pair#*=}";; *) mount --bind "${pair%%=*}" "${pair#*=}";; esac
done
exec "$@"
"""


@pytest.fixture
def digits_repository(digits_folder, tmp_path):
    repository = Repository.create(str(tmp_path / "store" / "repo"))
    ingest(repository, str(digits_folder / "val"), "digits", val_fraction=0.1)
    return repository


def train(tmp_path, mounts, urls, *options):
    """Run the training program on two hosts; returns status and errors of each rank."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not make mount namespaces here")
    own = tmp_path / "own"  # a folder that every host has, with a disk of its own
    own.mkdir(exist_ok=True)
    with reserved_ports(1) as (port,):
        processes = [start_rank(rank, own, mounts[rank], urls[rank], port, options) for rank in range(2)]
        try:
            errors = [process.communicate()[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    return [process.returncode for process in processes], errors


def start_rank(rank, own, mounts, url, port, options):
    environment = {
        "PYTHONPATH": ROOT,
        "OMP_NUM_THREADS": 1,
        "MOUNTS": " ".join([f"tmpfs={own}", *mounts]),
        "TMPDIR": own,
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    words = ["unshare", "-m", "sh", "-c", ON_HOST, "sh", sys.executable, "-m", "datasvc.trainer", "--repo", url]
    words += ["--cache", own / "cache", "--cache-budget", "50MB", *OPTIONS.split(), *options]
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.timeout(300)
def test_a_repository_that_each_host_mounts_elsewhere_is_one_repository(digits_repository, tmp_path):
    places = [tmp_path / "mnt-a", tmp_path / "mnt-b"]
    for place in places:
        place.mkdir()
    mounts = [[f"{tmp_path / 'store'}={place}"] for place in places]
    urls = [place / "repo" for place in places]
    status, errors = train(tmp_path, mounts, urls, "--max-steps", "6")
    assert status == [0, 0], errors
    status, errors = train(tmp_path, mounts, urls, "--max-steps", "9")
    assert status == [0, 0], errors
    models = datasvc.open(digits_repository.url).models
    assert models.restore("net").state["step"] == 9
    assert len(models.versions("net")) >= 2


@pytest.mark.timeout(300)
def test_a_folder_of_one_name_that_each_host_has_for_itself_is_refused_on_all_ranks(digits_repository, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "store", other)
    mounts = [[], [f"{other}={tmp_path / 'store'}"]]
    status, errors = train(tmp_path, mounts, [digits_repository.url] * 2, "--max-steps", "6")
    assert status == [2, 2], errors
    assert all("rank 1" in text and "Traceback" not in text for text in errors), errors
    assert not datasvc.open(digits_repository.url).models.names()
