"""Blocks of a shard that is still on its way: what is here is right, and what comes later is seen."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from datasvc.errors import ConfigError
from datasvc.loaders.core.batches import SampleBatch, ShardPart
from datasvc.loaders.tokens.token_blocks import StoredLists
from datasvc.loaders.tokens.token_decoder import TokenConfig, TokenDecoder
from datasvc.order import Step
from datasvc.repository import Repository
from datasvc.shards.format.partial_reader import open_partial
from datasvc.shards.format.reader import open_shard
from datasvc.shards.format.schema import shard_schema
from tests.shards.written_versions import write_shard

BLOCK = 2
COUNT = (1 << 16) + 100  # two record batches, by number of samples
CONFIG = TokenConfig(
    column="tokens",
    block_tokens=BLOCK,
    dtype=None,
    tokenizer=None,
    lengths_are_needed=False,
    pad=None,
    labels="within",
    documents=True,
    end=None,
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Objects, and a shard whose block n is n, n, and starts a document in its second token where n is odd."""
    schema = shard_schema(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("tokens", pa.list_(pa.uint32(), BLOCK), nullable=False),
            pa.field("document_starts", pa.list_(pa.int32()), nullable=False),
        ]
    )
    samples = [
        {"key": str(number), "tokens": [number] * BLOCK, "document_starts": [1] if number % 2 else []}
        for number in range(COUNT)
    ]
    objects = Repository.create(str(tmp_path_factory.mktemp("partial") / "repo")).objects
    return objects, write_shard(objects, samples, schema)


def batch_of(shard, rows):
    rows = np.array(rows)
    each = np.zeros_like(rows)
    part = ShardPart(shard, np.arange(len(rows)), rows)
    step = Step(0, len(rows), COUNT)
    return SampleBatch(0, step, rows, rows >= 0, each, rows, [], {}, [part], each)


def test_blocks_that_come_later_are_seen_in_a_shard_that_grows(stored):
    objects, row = stored
    shard = open_partial(objects, row.shard, row.index)
    assert len(shard.batches) == 2
    decoder = TokenDecoder(CONFIG, batch_size=2, describe=lambda *_: "")
    for rows in ([COUNT - 1, COUNT - 2], [1, 2], [COUNT - 3, 3]):
        shard.fetch(objects, np.array(rows))
        decoder.feed(batch_of(shard, rows))
        batch = decoder.take()
        assert batch.tokens.tolist() == [[number] * BLOCK for number in rows]
        assert batch.document_ids.tolist() == [[0, number % 2] for number in rows]


def test_a_shard_without_the_column_is_refused(stored):
    objects, row = stored
    shard = open_partial(objects, row.shard, row.index)
    shard.fetch(objects, np.array([0]))
    config = TokenConfig(**{**vars(CONFIG), "column": "ids"})
    decoder = TokenDecoder(config, batch_size=2, describe=lambda *_: "")
    decoder.feed(batch_of(shard, [0]))
    with pytest.raises(ConfigError, match=r"column 'ids' is null for samples of shard .* added without it"):
        decoder.take()


def test_what_a_block_has_behind_its_real_tokens_stays_whatever_lies_beside_it(tmp_path):
    def shard_of(kind, tokens, **more):
        fields = [pa.field("key", pa.string(), nullable=False), pa.field("tokens", kind, nullable=False)]
        if more:
            fields.append(pa.field("length", pa.int64(), nullable=False))
        objects = Repository.create(str(tmp_path / f"{kind}-{len(more)}")).objects
        row = write_shard(objects, [{"key": "0", "tokens": tokens, **more}], shard_schema(fields))
        return open_shard(objects, row.shard)

    whole = shard_of(pa.list_(pa.uint32(), 4), [1, 2, 3, 99], length=3)
    ragged = shard_of(pa.list_(pa.uint32()), [5, 6])
    config = dataclasses.replace(CONFIG, block_tokens=4, labels=None, documents=False)
    short = shard_of(pa.list_(pa.uint32()), [7, 8, 98], length=2)
    decoder = TokenDecoder(config, batch_size=3, describe=lambda *_: "")
    parts = [ShardPart(each, np.array([index]), np.array([0])) for index, each in enumerate((whole, ragged, short))]
    zeros = np.zeros(3, np.int64)
    mask = np.ones(3, np.bool_)
    decoder.feed(SampleBatch(0, Step(0, 3, 3), np.arange(3), mask, zeros, zeros, [], {}, parts, zeros))
    batch = decoder.take()
    assert batch.tokens.tolist() == [[1, 2, 3, 99], [5, 6, 0, 0], [7, 8, 98, 0]]
    assert batch.length.tolist() == [3, 2, 2]


def test_document_starts_with_null_among_them_are_refused_and_of_any_integers_taken():
    with pytest.raises(ConfigError, match="null in a list"):
        StoredLists(pa.chunked_array([[[0, None]]], pa.list_(pa.int32())))
    rows, starts = StoredLists(pa.chunked_array([[[0, 1], [2]]], pa.list_(pa.uint64()))).gather(np.array([1, 0]))
    assert (rows.tolist(), starts.tolist(), starts.dtype) == ([0, 1, 1], [2, 0, 1], np.int64)
