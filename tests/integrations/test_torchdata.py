"""Our loaders below the nodes of torchdata, in processes that are killed."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import datasvc
from datasvc.loaders import ImageLoader
from datasvc.testing import small_dataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed"),
]

ROOT = Path(__file__).parents[2]
NUM_SAMPLES, BATCH, EPOCHS = 24, 4, 2
# Commits the state after each step, and is killed after step `stop`.
PROGRAM = """
import os, signal, sys
import datasvc
from datasvc.integrations.torchdata import LoaderNode
from datasvc.loaders import ImageLoader
from torchdata.nodes import Loader, Prefetcher

url, name, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
repo = datasvc.open(url)
loader = ImageLoader(repo.dataset("pets@1")["train"], batch_size=4, training=True, size=8, columns=["key"])
batches = Loader(Prefetcher(LoaderNode(loader), prefetch_factor=3))
step, keys = 0, []
with repo.models.manager(name) as model:
    found = model.restore(default=None)
    if found is not None:
        step, keys = found.entry["step"], found.state["keys"]
        batches.load_state_dict(found.state["batches"])
    while step < 12:
        for batch in batches:
            step += 1
            keys = [*keys, list(batch.columns["key"])]
            model.save({"keys": keys, "batches": batches.state_dict()}, step=step, wait=True)
            if step == stop:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def repo(tmp_path):
    small_dataset(str(tmp_path / "repo"), "pets", samples=NUM_SAMPLES)
    return datasvc.open(str(tmp_path / "repo"))


def run(repo, name, stop):
    command = [sys.executable, "-c", PROGRAM, repo.repository.url, name, str(stop)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == (-signal.SIGKILL if stop else 0), done.stderr


def test_a_killed_program_loses_and_repeats_no_sample(repo):
    for stop in (3, 6, 0):  # in the middle and at the end of an epoch
        run(repo, "killed", stop)
    steps = repo.models.restore("killed").state["keys"]
    with ImageLoader(
        repo.dataset("pets@1")["train"], batch_size=BATCH, training=True, size=8, columns=["key"]
    ) as loader:
        assert steps == [list(batch.columns["key"]) for _ in range(EPOCHS) for batch in loader]


def test_a_for_after_a_break_reads_the_next_epoch(repo):
    from torchdata.nodes import Loader, Prefetcher

    from datasvc.integrations.torchdata import LoaderNode

    with ImageLoader(repo.dataset("pets@1")["train"], batch_size=BATCH, training=True, size=8) as loader:
        batches = Loader(Prefetcher(LoaderNode(loader), prefetch_factor=2))
        next(iter(batches))
        state = json.loads(json.dumps(batches.state_dict()))
        served = [(batch.epoch, int(batch.positions[0])) for _ in range(2) for batch in batches]
        del batches  # ends its thread
    expected = [(epoch, BATCH * step) for epoch in (1, 2) for step in range(NUM_SAMPLES // BATCH)]
    assert served == expected
    with ImageLoader(repo.dataset("pets@1")["train"], batch_size=BATCH, training=True, size=8) as loader:
        again = Loader(LoaderNode(loader))
        again.load_state_dict({"root": state["root"]["snapshot"], "num_yielded": 1})
        assert next(iter(again)).positions[0] == BATCH
