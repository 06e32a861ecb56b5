"""Packs of documents in the order, the batches, the states and the records of a run."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import datasvc
from datasvc.errors import BadSampleError, ConfigError, StateMismatchError
from datasvc.ledger.audit import audit_folders
from datasvc.ledger.masked import Masked
from datasvc.loaders import DataRanks, Mixture, OrderConfig, TokenFormat, TokenLoader
from datasvc.loaders.core.parts import end_epochs_before, take_part
from datasvc.loaders.torch import Dataset
from datasvc.models import ConsumptionTracker
from datasvc.replay.batch_at import batch_at
from datasvc.repository import Repository
from datasvc.runs.run_folders import new_run_id
from tests.cli.command import run
from tests.models.trainings import commit
from tests.shards.views.test_kept_views import sweep

BLOCK = 16
NUM_DOCUMENTS = 120
FIRST = 1000  # tokens of document i are from i * FIRST + 1


def documents():
    """Documents of 0 to 40 tokens, that all differ, and which of their tokens count."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 14, NUM_DOCUMENTS)
    lengths[[7, 50]], lengths[9] = 0, 40
    tokens = [(number * FIRST + 1 + np.arange(length)).tolist() for number, length in enumerate(lengths)]
    return tokens, [[bool((token + number) % 3) for token in each] for number, each in enumerate(tokens)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    tokens, counted = documents()
    counted[20] = [False] * len(tokens[20])
    (folder / "source").mkdir()
    columns = {
        "key": [f"d{number:03}" for number in range(NUM_DOCUMENTS)],
        "tokens": pa.array(tokens, pa.list_(pa.int32())),
        "counted": pa.array(counted, pa.list_(pa.bool_())),
    }
    pq.write_table(pa.table(columns), folder / "source" / "documents.parquet")
    repo = datasvc.open(str(folder / "repo"), create=True)
    repo.datasets.ingest(str(folder / "source"), "documents", shard_bytes=1200)
    return folder


@pytest.fixture
def repo(folder):
    return datasvc.open(str(folder / "repo"))


@pytest.fixture
def packed(repo):
    with pytest.warns(RuntimeWarning, match="leaves out 2 documents without tokens"):
        return repo.dataset("documents")["train"].packed(BLOCK)


def read(split, **options):
    options = {"batch_size": 4, "training": True, "labels": "within", "documents": True, "prefetch": 0} | options
    with TokenLoader(split, **options) as loader:
        return list(loader.numpy())


def segments(batch):
    """Yield block, tokens, labels and positions of each segment of a batch; padding too."""
    bounds = batch.cu_seqlens.tolist()
    flat = [getattr(batch, name).reshape(-1) for name in ("tokens", "labels", "position_ids")]
    for start, stop in itertools.pairwise(bounds):
        yield start // BLOCK, *(values[start:stop].tolist() for values in flat)


def test_an_epoch_serves_every_token_once_with_labels_and_positions_of_its_document(packed):
    assert packed.table.num_shards > 2
    assert len(packed) == NUM_DOCUMENTS
    tokens, _ = documents()
    seen = []
    for batch in read(packed, tail="short"):
        keys = iter(batch.keys)
        counts = [0] * len(batch.positions)
        for block, ids, labels, positions in segments(batch):
            if not ids[0]:
                continue  # padding
            counts[block] += 1
            document = ids[0] // FIRST
            assert next(keys) == f"d{document:03}"
            assert ids == list(range(ids[0], ids[0] + len(ids)))
            assert labels == [*ids[1:], -100]
            assert positions == list(range(len(ids)))
            seen += ids
        assert counts == batch.document_counts.tolist()
        assert batch.length.tolist() == (batch.tokens > 0).sum(1).tolist()
        assert ((batch.document_ids >= 0) == (batch.tokens > 0)).all()
        assert (batch.labels[batch.tokens == 0] == -100).all()
    assert sorted(seen) == sorted(token for each in tokens for token in each)
    assert packed.table.packing.tokens == len(seen)


@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_packs_are_computed_once_and_again_after_a_loss(repo, packed, monkeypatch, tmp_path):
    split = repo.dataset("documents")["train"]
    monkeypatch.setattr("datasvc.shards.views.pack.pack_documents", None)
    assert split.packed(BLOCK).digest == packed.digest
    copy = datasvc.open(str(tmp_path / "copy"), create=True)
    copy.datasets.pull(repo.repository, ["documents@1"])
    assert sweep(copy.repository).objects == ()
    copied = copy.dataset("documents")["train"].packed(BLOCK)
    assert [batch.keys for batch in read(copied)] == [batch.keys for batch in read(packed)]
    with pytest.raises(TypeError):
        split.packed(BLOCK + 1)
    monkeypatch.undo()
    repo.repository.objects.local_path(packed.digest).unlink()
    assert datasvc.open(repo.repository.url).dataset("documents")["train"].packed(BLOCK).digest == packed.digest


@pytest.mark.parametrize("order", [OrderConfig(seed=4), OrderConfig(seed=4, shuffle="windowed", lanes=2, block=5)])
def test_a_run_resumed_at_another_number_of_ranks_has_the_packs_of_one_that_was_not(packed, order):
    def serve(ranks, batch_size, steps, state=None):
        loaders = [
            TokenLoader(packed, batch_size=batch_size, training=True, order=order, ranks=DataRanks(rank, ranks))
            for rank in range(ranks)
        ]
        found = {}
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            for _, batch in zip(range(steps), loader.numpy(), strict=False):
                found |= dict(zip(batch.positions.tolist(), batch.tokens.tolist(), strict=True))
            after = loader.state_dict()
            loader.close()
        return found, json.loads(json.dumps(after))

    whole, _ = serve(1, 12, 3)
    first, state = serve(3, 4, 1)
    assert first | serve(2, 6, 2, state)[0] == whole
    with pytest.raises(StateMismatchError):
        serve(1, 12, 1, state | {"version": packed.table.view.table})


def test_a_loss_mask_says_which_tokens_are_labels_and_documents_without_any_are_left_out(repo):
    split = repo.dataset("documents")["train"]
    tokens, counted = documents()
    counted[20] = [False] * len(tokens[20])
    flags = {
        token: flag for ids, each in zip(tokens, counted, strict=True) for token, flag in zip(ids, each, strict=True)
    }
    with pytest.warns(RuntimeWarning, match=r"2 documents without tokens and \d+ documents whose loss mask"):
        batches = read(split, pack="best-fit", block_tokens=BLOCK, loss_mask="counted", tail="short")
    served = set()
    for batch in batches:
        for _, ids, labels, _ in segments(batch):
            expected = [token if token and flags[token] else -100 for token in ids[1:]] + [-100]
            assert labels == expected
            served.add(ids[0] // FIRST)
    without = {number for number, each in enumerate(counted) if not any(each[1:])}
    assert not (served & without)
    plain = read(split, tokens=TokenFormat(block_tokens=40), loss_mask="counted", documents=False, labels="across")
    for batch in plain:
        expected = [[flags.get(token, False) for token in row] for row in batch.tokens[:, 1:].tolist()]
        assert ((batch.labels[:, :-1] != -100) == np.array(expected)).all()


def test_only_the_bounds_of_documents_are_made_on_request(packed):
    every, bounds = read(packed)[0], read(packed, documents="cu_seqlens")[0]
    assert bounds.document_ids is None
    assert (every.cu_seqlens == bounds.cu_seqlens).all()
    assert (every.labels == bounds.labels).all()


def test_masked_documents_are_zeros_and_the_others_of_their_packs_as_they_were(repo, packed):
    chosen = 11  # of shard 0
    masked = Masked.rows(packed.digest, {0: [chosen]})
    for before, after in zip(read(packed), read(packed, masked=masked), strict=True):
        hidden = before.tokens // FIRST == int(packed[chosen]["key"][1:])
        assert (after.tokens == np.where(hidden & (before.tokens > 0), 0, before.tokens)).all()
        assert (after.labels == np.where(hidden & (before.tokens > 0), -100, before.labels)).all()
        assert after.mask.tolist() == (after.tokens.sum(1) > 0).tolist()


def test_a_version_knows_the_documents_of_its_steps(repo, packed):
    loader = TokenLoader(packed, batch_size=3, training=True, labels="within", seed=2)
    tracker = ConsumptionTracker(loader)
    name = f"packs/{new_run_id()}"
    repo.repository.storage.create(f"runs/{name}/00000001.json", b"{}")
    repo.runs.record(name, loader)
    seen, values = [], {}
    for number, batch in zip(range(2), loader, strict=False):
        seen.append((batch.tokens, batch.keys))
        loss = torch.arange(3.0) + 10 * number
        loader.record(batch, loss)
        blocks = np.repeat(np.arange(3), batch.document_counts.numpy())
        values |= {key: float(loss[block]) for key, block in zip(batch.keys, blocks, strict=True)}
    loader.close()
    commit(repo.repository, "packs", 2, [tracker.use()], run=name)
    for step, (tokens, keys) in enumerate(seen, start=1):
        replayed = batch_at(repo.repository, "packs@1", step)
        assert replayed.keys == keys
        assert torch.equal(torch.as_tensor(replayed.batch.tokens), tokens)
    key = seen[1][1][0]
    assert any(use.key == key and use.step == 2 for use in repo.models.trained_on(["packs"], keys=[key]).uses(0))
    signal = repo.runs.signal(name, packed, "loss")
    assert {
        each["key"]: value for each, value in zip(packed, signal.tolist(), strict=True) if not np.isnan(value)
    } == values


@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_mixtures_have_shares_of_packs(repo, packed):
    other = repo.dataset("documents")["train"].take(0.5).packed(BLOCK)
    mixture = Mixture([(packed, 1), (other, 1)], block=8)
    assert mixture.num_positions == packed.num_positions + other.num_positions
    batches = read(mixture, batch_size=8)
    assert all(np.bincount(batch.sources).tolist() == [4, 4] for batch in batches)
    assert all((batch.length <= BLOCK).all() for batch in batches)
    with pytest.raises(ConfigError, match="is not packed, and other splits are"):
        read(Mixture([(packed, 1), (repo.dataset("documents")["train"].take(0.4), 1)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 0}, "block_tokens is 0; expected an integer from 1"),
        ({"block_tokens": 16, "rule": "first-fit"}, "pack is 'first-fit'; expected 'best-fit'"),
        (
            {"block_tokens": 16, "too_long": "refuse"},
            "1 document .* more than 16 tokens, up to 40; give larger blocks",
        ),
        ({"block_tokens": 16, "column": "key"}, "'key' of .* is string; expected lists of integers"),
        ({"block_tokens": 16, "loss_mask": "key"}, "expected a column of lists of Booleans"),
        ({"block_tokens": 16, "lengths": lambda samples: [1.0] * len(samples)}, "lengths returned float64"),
        ({"block_tokens": 16, "lengths": lambda samples: np.zeros(len(samples), int)}, "nothing to pack"),
    ],
)
def test_what_cannot_be_packed_is_refused(repo, options, message):
    with pytest.raises((ConfigError, BadSampleError), match=message):
        repo.dataset("documents")["train"].packed(**options)


def test_a_plan_and_the_parts_of_an_epoch_count_packs(packed, repo, tmp_path):
    planned = run(
        "plan", "cache", f"documents[{packed.digest}]", "--repo", repo.repository.url, "--budget", "1GB", "--json"
    )
    assert json.loads(planned.stdout)["num_samples"] == packed.num_positions < len(packed)
    with TokenLoader(packed, batch_size=4, training=True, prefetch=0, ledger=tmp_path) as loader:
        for position in range(0, packed.num_positions - 3, 4):
            take_part(loader, 0, position, 0)
        end_epochs_before(loader, 1)
    (epoch,) = audit_folders([tmp_path]).epochs
    assert epoch.is_faultless
    assert epoch.served + epoch.dropped == packed.num_positions


@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_a_function_says_how_many_tokens_of_each_document_are_used(repo):
    split = repo.dataset("documents")["train"]
    batches = read(
        split,
        pack="best-fit",
        block_tokens=8,
        lengths=lambda samples: [min(len(each), 2) for each in samples["tokens"]],
        tail="short",
    )
    tokens, _ = documents()
    served = sorted(token for batch in batches for token in batch.tokens[batch.tokens > 0].tolist())
    assert served == sorted(token for each in tokens for token in each[:2])


def test_packs_are_refused_where_samples_are_read(repo, packed):
    for use in (
        lambda: Dataset(packed),
        lambda: packed.take(0.5),
        lambda: packed.packed(8),
        lambda: read(packed, labels="across"),
        lambda: read(packed, tokens=TokenFormat(block_tokens=8)),
    ):
        with pytest.raises(ConfigError, match=r"packed|labels is 'across'|block_tokens is 8, and the packs"):
            use()
    with pytest.raises(ConfigError, match="block_tokens and lengths are for packs"):
        read(repo.dataset("documents")["train"], block_tokens=8)
    assert Repository.open(repo.repository.url).objects.read(packed.digest)
