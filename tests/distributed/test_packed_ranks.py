"""Training on packs that is killed and resumed at another number of ranks: which packs each step had."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.ledger.audit import audit_folders
from datasvc.loaders import OrderConfig, TokenLoader
from tests.support import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
BLOCK, VOCABULARY, GLOBAL_BATCH = 32, 50, 6

# Each rank records the packs that it trains on, and ends without a word before a step that is given.
PROGRAM = """
import json, os, signal, sys
import torch
from datasvc.trainer.recipes.tasks.language import LanguageModelling

folder, killed_batch = sys.argv.pop(1), int(sys.argv.pop(1))
real, count = LanguageModelling.unpack, 0

def unpack(self, batch, device):
    global count
    count += 1
    if count == killed_batch:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(f"{folder}/{os.getpid()}", "a") as file:
        for position, tokens in zip(batch.positions.tolist(), batch.tokens.tolist()):
            file.write(json.dumps([batch.epoch, position, tokens]) + "\\n")
    return real(self, batch, device)

LanguageModelling.unpack = unpack
torch.set_num_threads(1)
from datasvc.trainer.__main__ import main
main()
"""


@pytest.fixture
def repo(tmp_path):
    random = np.random.default_rng(0)
    tokens = [random.integers(1, VOCABULARY, length).tolist() for length in random.integers(1, BLOCK, 100)]
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.uint16()))}), tmp_path / "train" / "d.parquet")
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.datasets.ingest(str(tmp_path / "train"), "documents")
    return repo


def launch(repo, folder, num_ranks, *, killed_batch=0, servers=0):
    # fmt: off
    words = [
        sys.executable, "-m", "datasvc.trainer.launch", "-np", str(num_ranks + servers), "--no-prefix",
        *(("--servers", str(servers)) if servers else ()),
        warm_python.command(), "-c", PROGRAM, str(folder), str(killed_batch),
        "--repo", repo.repository.url, "--name", "packed", "--data", "documents", "--pack", "best-fit",
        "--block-tokens", str(BLOCK), "--vocabulary", str(VOCABULARY), "--batch-size", str(GLOBAL_BATCH // num_ranks),
        "--checkpoint-every", "2", "--max-steps", "12", "--epochs", "9",
        "--model-option", "layers=1", "heads=2", "width=16", f"context={BLOCK}", "--ledger", str(folder / "ledger"),
        *(("--sync", "ssp:1") if servers else ()),
    ]
    # fmt: on
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)


def test_a_run_that_was_killed_continues_at_another_number_of_ranks_with_the_packs_of_its_order(repo, tmp_path):
    folder = tmp_path / "seen"
    folder.mkdir()
    assert launch(repo, folder, 2, killed_batch=6).returncode
    done = launch(repo, folder, 3)
    assert done.returncode == 0, done.stderr
    records = [
        json.loads(line) for file in folder.iterdir() if file.is_file() for line in file.read_text().splitlines()
    ]
    seen = {}
    for epoch, position, tokens in records:
        assert seen.setdefault((epoch, position), tokens) == tokens
    packed = repo.dataset("documents")["train"].packed(BLOCK)
    with TokenLoader(packed, batch_size=GLOBAL_BATCH, training=True, order=OrderConfig()) as loader:
        expected = {}
        while len(expected) < 12 * GLOBAL_BATCH:
            for batch in loader.numpy():
                places = [(batch.epoch, position) for position in batch.positions.tolist()]
                expected |= dict(zip(places, batch.tokens.tolist(), strict=True))
                if len(expected) == 12 * GLOBAL_BATCH:
                    break
    assert seen == expected
    assert max(epoch for epoch, _ in seen) >= 1
    epochs = audit_folders([folder / "ledger"]).epochs
    assert all(each.is_faultless and not each.never.count and not each.repeated.count for each in epochs)
    # Every document was trained on, and step 12 is known by its documents.
    keys = [sample["key"] for sample in repo.dataset("documents")["train"]]
    report = repo.models.trained_on(["packed"], keys=keys)
    assert all(report.uses(number) for number in range(len(keys)))


def test_workers_of_a_parameter_server_share_the_packs_of_each_epoch(repo, tmp_path):
    folder = tmp_path / "seen"
    folder.mkdir()
    done = launch(repo, folder, 2, servers=1)
    assert done.returncode == 0, done.stderr
    served = [
        tuple(json.loads(line)[:2]) for file in folder.iterdir() if file.is_file() for line in file.open().readlines()
    ]
    num_packs = repo.dataset("documents")["train"].packed(BLOCK).num_positions
    stop = num_packs // GLOBAL_BATCH * GLOBAL_BATCH
    assert sorted(served) == [divmod(number, stop) for number in range(12 * GLOBAL_BATCH)]
    assert audit_folders([folder / "ledger"]).is_proven
