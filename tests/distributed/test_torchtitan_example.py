"""torchtitan's Trainer with our loader and checkpoints, killed and started again."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import datasvc
from datasvc.repository import Repository
from datasvc.shards import ingest

ROOT = Path(__file__).parents[2]
BLOCK, VOCABULARY, GLOBAL_BATCH = 16, 64, 8
# By epoch and position: each block of the first epoch once, and four batches of the second.
FIFTEEN_BATCHES = [divmod(place, 11 * GLOBAL_BATCH) for place in range(15 * GLOBAL_BATCH)]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("torchtitan") is None or find_spec("triton") is None,
        reason="torchtitan or triton, which its models import, is not installed",
    ),
]


@pytest.fixture
def url(tmp_path):
    """Eleven global batches of blocks, so that the runs cross the end of an epoch."""
    folder = tmp_path / "source" / "train"
    folder.mkdir(parents=True)
    tokens = [[(5 * block + 3 * place) % VOCABULARY for place in range(BLOCK)] for block in range(11 * GLOBAL_BATCH)]
    pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32(), BLOCK))}), folder / "blocks.parquet")
    url = str(tmp_path / "repo")
    ingest(Repository.create(url), str(folder.parent), "blocks")
    return url


def run(url, name, *, save_every=100, killed_at=None):
    """Train 15 steps on one rank, or until it is killed when it saves; return the finished process."""
    programs = ROOT / "tests" / "distributed" / "programs"
    program = [programs / "torchtitan_on_cpu.py"]
    program += [] if killed_at is None else [programs / "killed_at_save.py", killed_at]
    program += [ROOT / "examples" / "torchtitan_llama.py", "--repo", url, "--data", "blocks@1", "--name", name]
    words = ["--global-batch", GLOBAL_BATCH, "--steps", 15, "--save-every", save_every]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1]
    return subprocess.run(
        [*map(str, launcher), *map(str, program), *map(str, words)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
        },
        cwd=Path(url).parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def trained(*args, **options):
    """Make a `run` that must succeed; return its version."""
    done = run(*args, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return re.search(r"saved (\S+)", done.stdout)[1]


def weights(repo, ref):
    state = repo.models.restore(ref).state
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def consumed(repo, ref):
    """Return the epoch and the position of each block that a version was trained on, in order."""
    keys = [sample["key"] for sample in repo.dataset("blocks@1")["train"]]
    return sorted((use.epoch, use.position) for use in repo.models.trained_on([ref], keys=keys).all_uses())


def test_a_killed_run_of_torchtitan_s_trainer_ends_as_an_uninterrupted_one(url):
    """Its weights are equal bit for bit, and each block of the epoch was served once.

    torchtitan 0.3.0 needs GPUs for several ranks; `tests/integrations` resumes its components on other data ranks.
    """
    whole = trained(url, "whole")
    killed = run(url, "parts", save_every=5, killed_at=10)
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr
    repo = datasvc.open(url)
    assert repo.models.describe("parts").entry["step"] == 5
    last = trained(url, "parts", save_every=5)
    repo = datasvc.open(url)
    torch.testing.assert_close(weights(repo, last), weights(repo, whole), rtol=0, atol=0)
    for ref in (whole, last):
        assert consumed(repo, ref) == FIFTEEN_BATCHES


def test_torchtitans_own_loader_refuses_other_data_ranks():
    dataloader = pytest.importorskip("torchtitan.components.dataloader", reason="torchtitan is not installed")
    saved = dataloader.ParallelAwareDataloader([1, 2, 3, 4], dp_rank=0, dp_world_size=4, batch_size=1).state_dict()
    fewer = dataloader.ParallelAwareDataloader([1, 2, 3, 4], dp_rank=0, dp_world_size=2, batch_size=1)
    with pytest.raises(AssertionError, match="resharding is not supported"):
        fewer.load_state_dict(saved)
