"""torchtitan's Llama with our loader and checkpoints goes on with other data ranks, which its own loader refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.repository import Repository
from datasvc.shards import ingest

ROOT = Path(__file__).parents[2]
BLOCK, VOCABULARY, GLOBAL_BATCH = 16, 64, 8
# By epoch and position: each block of the first epoch once, and four batches of the second.
FIFTEEN_BATCHES = [divmod(place, 11 * GLOBAL_BATCH) for place in range(15 * GLOBAL_BATCH)]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


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


def run(url, name, steps, *, ranks, tensor=1, save_every=None, killed_at=None):
    """Train until a step, or until rank 1 is killed when it saves; return the finished process."""
    program = [ROOT / "examples" / "torchtitan_llama.py"]
    if killed_at is not None:
        program = [ROOT / "tests" / "distributed" / "programs" / "killed_at_save.py", killed_at, *program]
    words = ["--repo", url, "--data", "blocks@1", "--name", name, "--vocabulary", VOCABULARY]
    words += ["--global-batch", GLOBAL_BATCH, "--steps", steps, "--tensor", tensor]
    words += [] if save_every is None else ["--save-every", save_every]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return subprocess.run(
        [*map(str, launcher), *map(str, program), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def losses(*args, **options):
    """Return the loss of each step by its number of a `run` that must succeed."""
    done = run(*args, **options)
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)


def losses_in(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", text)}


def consumed(repo, ref):
    """Return the epoch and the position of each block that a version was trained on, in order."""
    keys = [sample["key"] for sample in repo.dataset("blocks@1")["train"]]
    return sorted((use.epoch, use.position) for use in repo.models.trained_on([ref], keys=keys).all_uses())


def test_a_run_of_torchtitans_model_goes_on_with_other_data_ranks(url):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    whole = losses(url, "whole", 15, ranks=4)
    assert list(whole) == list(range(15))
    assert whole[14] < whole[0] - 1

    parts = losses(url, "parts", 5, ranks=4)
    parts |= losses(url, "parts", 10, ranks=4, tensor=2)  # two data ranks
    parts |= losses(url, "parts", 15, ranks=1)
    assert parts == pytest.approx(whole, abs=1e-5)

    # The last version of each run has consumed every block of the first epoch once, and four batches of the second.
    repo = datasvc.open(url)
    assert [repo.models.describe(f"parts@{number}").entry["parent"] for number in (2, 3)] == ["parts@1", "parts@2"]
    for ref in ("whole@1", "parts@3"):
        assert consumed(repo, ref) == FIFTEEN_BATCHES


def test_a_killed_run_goes_on_from_its_last_version(url):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    whole = losses(url, "whole", 15, ranks=2)
    killed = run(url, "killed", 15, ranks=2, save_every=2, killed_at=6)
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr
    assert list(losses_in(killed.stdout)) == list(range(6))

    # Steps 4 and 5 had no version yet, so they are repeated, with one rank in place of two.
    rest = losses(url, "killed", 15, ranks=1, save_every=2)
    assert list(rest) == list(range(4, 15))
    assert losses_in(killed.stdout) | rest == pytest.approx(whole, abs=1e-5)
    repo = datasvc.open(url)
    steps = [repo.models.describe(f"killed@{number}").entry["step"] for number in range(1, 9)]
    assert steps == [2, 4, 6, 8, 10, 12, 14, 15]
    assert consumed(repo, "killed@8") == FIFTEEN_BATCHES


def test_torchtitans_own_loader_refuses_other_data_ranks():
    dataloader = pytest.importorskip("torchtitan.components.dataloader", reason="torchtitan is not installed")
    saved = dataloader.ParallelAwareDataloader([1, 2, 3, 4], dp_rank=0, dp_world_size=4, batch_size=1).state_dict()
    fewer = dataloader.ParallelAwareDataloader([1, 2, 3, 4], dp_rank=0, dp_world_size=2, batch_size=1)
    with pytest.raises(AssertionError, match="resharding is not supported"):
        fewer.load_state_dict(saved)
