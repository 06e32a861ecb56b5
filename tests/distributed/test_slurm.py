"""Slurm itself, with two nodes on this machine: prolog, epilog, the launcher, and a job that is requeued."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.distributed.slurm_cluster import SlurmCluster, why_not
from tests.support.doc_blocks import read_blocks, replace_in
from tests.support.ports import reserved_ports

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef0123456789abcdef"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("slurm") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return repository


@pytest.fixture(scope="module")
def state():
    """A folder with a short name, as sockets need it, for the cluster and the files of its prolog."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def node_url(repository, state):
    """The server of a node, and its token in `state`."""
    (state / "token").write_text(TOKEN)
    (state / "token").chmod(0o600)
    words = ["serve", "--repo", repository.url, "--cache", state / "cache", "--budget", "100MB", "--port", "0"]
    words += ["--token-file", state / "token", "--json"]
    server = subprocess.Popen([sys.executable, "-m", "datasvc", *words], cwd=ROOT, stdout=subprocess.PIPE)
    yield json.loads(server.stdout.readline())["url"]
    server.terminate()
    server.communicate()


@pytest.fixture(scope="module")
def cluster(node_url, state):
    scripts = {"DATASVC_NODE": node_url, "DATASVC_TOKEN_FILE": state / "token", "DATASVC_STATE": state / "jobs"}
    (state / "cluster").mkdir()
    with reserved_ports(3) as ports, SlurmCluster(state / "cluster", scripts, ports) as running:
        yield running


def test_a_job_finds_its_data_set_staged_and_its_end_cancels_the_rest(cluster, state):
    job = cluster.submit("#!/bin/sh\nsleep 600\n", "--nodes=1", "--comment=datasvc:digits@1")
    kept = state / "jobs" / f"job-{job}"
    cluster.wait_until(lambda: kept.exists() and kept.read_text())
    cluster.run("scancel", job)
    cluster.wait_until(lambda: not kept.exists())


# The training program, but for rank 0 of a job's first start: after step 18 it sends what `--signal=B:TERM` sends,
# and waits until the signal has come back to it.
PROGRAM = """
import os, signal, subprocess
from datasvc.trainer.recipes.reporting.events import JsonEvents

real = JsonEvents.report
def report(self, event, **facts):
    real(self, event, **facts)
    if event == "step" and facts["step"] == 18 and "SLURM_RESTART_COUNT" not in os.environ:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        subprocess.run(["scancel", "--batch", "--signal=TERM", os.environ["SLURM_JOB_ID"]], check=True)
        os.read(reading, 1)
        signal.set_wakeup_fd(-1)
if os.environ["SLURM_JOB_NAME"] == "interrupted":
    JsonEvents.report = report

from datasvc.trainer.__main__ import main
main()
"""


@pytest.fixture
def train(cluster, repository, tmp_path):
    """Submits the script of the tutorial; returns the number of the job."""
    (script,) = [block for block in read_blocks("many-nodes.md") if "#SBATCH" in block.text]
    (tmp_path / "program.py").write_text(PROGRAM)
    texts = {
        "--nodes=4 --ntasks-per-node=8 --gpus-per-node=8": "--nodes=2 --ntasks-per-node=1",
        "DATASVC_REPO=/shared/repo": f"DATASVC_REPO={repository.url} PYTHONPATH={ROOT} OMP_NUM_THREADS=1",
        "/scratch/": f"{tmp_path}/",
        "/shared/": f"{tmp_path}/",
        "datasvc-run python -m datasvc.trainer": f"{sys.executable} -m datasvc.trainer.launch --no-prefix "
        f"{sys.executable} {tmp_path}/program.py",
        "--device cuda": "--device cpu",
        "--peers ranks": "--scale 0.8 1 --flip 0",
    }

    def submit(name):
        (block,) = replace_in([script], texts | {"digits-cnn": name, "/ledger": f"/ledger-{name}"})
        return cluster.submit(block.text, f"--job-name={name}")

    return submit


def test_the_job_of_the_tutorial_that_gets_a_signal_is_requeued_and_ends_with_the_bits_of_another(
    cluster, repository, train
):
    jobs = {name: train(name) for name in ("interrupted", "whole")}
    ends = {name: cluster.end_of(job) for name, job in jobs.items()}
    assert {name: (end["JobState"], end["Restarts"]) for name, end in ends.items()} == {
        "interrupted": ("COMPLETED", "1"),
        "whole": ("COMPLETED", "0"),
    }
    lines = Path(ends["interrupted"]["StdOut"]).read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    steps = [event["step"] for event in events if event["event"] == "step"]
    (stopped,) = [event for event in events if event["event"] == "stopped"]
    assert stopped["signal"] == signal.SIGTERM
    versions = {name: describe_model(repository, name).entry for name in jobs}
    assert steps == list(range(1, versions["whole"]["step"] + 1)), "no step is done twice"
    assert versions["interrupted"]["content"] == versions["whole"]["content"]
    assert versions["interrupted"]["metrics"] == versions["whole"]["metrics"]
