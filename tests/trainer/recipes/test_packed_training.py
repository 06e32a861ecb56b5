"""A model that is trained on packs learns what it learns from the same documents, each in a block of its own."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train

BLOCK, VOCABULARY, NUM_DOCUMENTS = 24, 13, 40


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    random = np.random.default_rng(0)
    for split, count in (("train", NUM_DOCUMENTS), ("val", 9)):
        tokens = [random.integers(0, VOCABULARY, length).tolist() for length in random.integers(1, BLOCK, count)]
        counted = [[bool(place % 3) for place in range(len(each))] for each in tokens]
        (folder / split).mkdir()
        columns = {
            "tokens": pa.array(tokens, pa.list_(pa.int32())),
            "counted": pa.array(counted, pa.list_(pa.bool_())),
        }
        pq.write_table(pa.table(columns), folder / split / "documents.parquet")
    repo = datasvc.open(str(folder / "repo"), create=True)
    repo.datasets.ingest(str(folder), "documents")
    return repo


def run(repo, name, capsys, **settings):
    options = ("layers=2", "heads=2", "width=32", "dropout=0.0", f"context={BLOCK}")
    settings = {"model_option": options, "block_tokens": BLOCK, "optimizer": "adamw", "max_steps": 3} | settings
    url = repo.repository.url
    train(TrainConfig(repo=url, name=name, data="documents", vocabulary=VOCABULARY, learning_rate=0.01, **settings))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [event[name] for event in events for name in ("loss", "val_loss") if name in event]


@pytest.mark.filterwarnings("ignore:.*leaves out")
@pytest.mark.parametrize("loss_mask", [None, "counted"])
def test_losses_are_those_of_documents_in_blocks_of_their_own(repo, capsys, loss_mask):
    train_split = repo.dataset("documents")["train"]
    packs = train_split.packed(BLOCK, loss_mask=loss_mask).num_positions
    assert packs < NUM_DOCUMENTS / 1.5
    masked = {} if loss_mask is None else {"loss_mask": loss_mask}
    # One step is one epoch, so both train on all documents.
    packed = run(repo, f"packed-{loss_mask}".lower(), capsys, pack="best-fit", batch_size=packs, epochs=3, **masked)
    alone = run(repo, f"alone-{loss_mask}".lower(), capsys, batch_size=NUM_DOCUMENTS, epochs=3, **masked)
    assert len(packed) >= 4
    assert packed == pytest.approx(alone, rel=1e-5)
    assert len(set(packed)) >= 4


@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_steps_that_are_skipped_are_counted_in_packs(repo, capsys):
    batch_size = repo.dataset("documents")["train"].packed(BLOCK).num_positions // 2
    run(repo, "skipped", capsys, pack="best-fit", batch_size=batch_size, skip="3", epochs=2)
    (use,) = repo.models.describe("skipped").entry["data"]
    assert use["state"]["masked"] == {"positions": [[1, 0, batch_size]]}


def test_packs_need_the_size_of_a_block():
    with pytest.raises(ConfigError, match="pack is 'best-fit'; give --block-tokens too"):
        TrainConfig(repo="r", name="m", data="d", pack="best-fit")
    with pytest.raises(ConfigError, match="too_long is 'refuse', and there are no packs"):
        TrainConfig(repo="r", name="m", data="d", too_long="refuse")
