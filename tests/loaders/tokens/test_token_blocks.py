"""Every way to store blocks gives the same tokens."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.loaders.tokens.token_blocks import StoredBlocks, StoredLists, choose_format

BLOCK = 5


def batches_of(kind, blocks, cuts):
    """Return blocks as record batches that begin at `cuts`, each a slice of a larger one."""
    dtype = kind.value_type.to_pandas_dtype() if kind != pa.large_binary() else np.uint16
    stored = [np.array(block, dtype) for block in blocks]
    column = pa.array([each.tobytes() if kind == pa.large_binary() else each.tolist() for each in stored], kind)
    whole = pa.record_batch({"tokens": column})
    bounds = sorted({0, len(blocks), *(cut % (len(blocks) + 1) for cut in cuts)})
    return [whole.slice(start, stop - start) for start, stop in itertools.pairwise(bounds)]


def written(batches, how):
    """Return the batches as they are in memory, or as those of one file."""
    if how == "apart" or not batches:
        return batches
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batches[0].schema) as file:
        for batch in batches:
            file.write_batch(batch)
    reader = pa.ipc.open_file(sink.getvalue())
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


FIXED = [pa.list_(pa.uint16(), BLOCK), pa.list_(pa.int32(), BLOCK), pa.list_(pa.int64(), BLOCK)]
RAGGED = [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.large_binary()]


@given(st.data(), st.sampled_from(FIXED + RAGGED), st.sampled_from(["file", "apart"]))
def test_blocks_come_back_in_the_order_asked_for_whichever_way_they_are_stored(data, kind, how):
    is_fixed = kind in FIXED
    sizes = st.integers(BLOCK, BLOCK) if is_fixed else st.integers(0, BLOCK)
    block = sizes.flatmap(lambda size: st.lists(st.integers(0, 2**15 - 1), min_size=size, max_size=size))
    blocks = data.draw(st.lists(block, min_size=1, max_size=12))
    batches = written(batches_of(kind, blocks, data.draw(st.lists(st.integers(0, 12), max_size=3))), how)
    dtype = "uint16" if kind == pa.large_binary() else None
    found = choose_format(batches[0].schema, "tokens", None if is_fixed else BLOCK, dtype)
    assert (found.block_tokens, found.is_ragged) == (BLOCK, not is_fixed)
    stored = StoredBlocks(batches, found)
    rows = np.array(data.draw(st.lists(st.integers(0, len(blocks) - 1), max_size=9)), np.int64)
    gathered = stored.gather(rows)
    assert gathered.shape == (len(rows), BLOCK)
    sizes = (stored.sizes // found.dtype.itemsize).tolist()
    assert sizes == [len(block) for block in blocks]
    assert [gathered[index, : sizes[row]].tolist() for index, row in enumerate(rows.tolist())] == [
        blocks[row] for row in rows.tolist()
    ]


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=4)), min_size=1, max_size=8), st.data())
def test_lists_come_back_end_to_end_with_the_row_of_each_value(lists, data):
    cut = data.draw(st.integers(0, len(lists)))
    column = pa.array([[1, 2], *lists], pa.list_(pa.int32()))[1:]
    stored = StoredLists(pa.chunked_array([column[:cut], column[cut:]]))
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=6))
    owners, values = stored.gather(np.array(rows, np.int64))
    expected = [(index, value) for index, row in enumerate(rows) for value in lists[row] or []]
    assert list(zip(owners.tolist(), values.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (pa.list_(pa.float32(), BLOCK), {}, "lists of integers, or blobs"),
        (pa.string(), {}, "lists of integers, or blobs"),
        (FIXED[0], {"column": "ids"}, r"no column 'ids' with tokens; the columns are tokens \(fixed_size_list"),
        (FIXED[0], {"block_tokens": 7}, "block_tokens is 7, but the blocks of column 'tokens' have 5 tokens"),
        (FIXED[0], {"dtype": "uint16"}, "dtype is only for blobs"),
        (RAGGED[0], {}, r"give tokens=TokenFormat\('tokens', block_tokens=N\)"),
        (pa.large_binary(), {"block_tokens": 7}, "give the type of a token in them"),
        (pa.large_binary(), {"block_tokens": 7, "dtype": "float32"}, "expected integers"),
        (pa.large_binary(), {"block_tokens": 7, "dtype": "words"}, "expected integers"),
    ],
)
def test_a_column_that_holds_no_blocks_is_refused_with_what_to_say(kind, options, match):
    wanted = {"column": "tokens", "block_tokens": None, "dtype": None, **options}
    with pytest.raises(ConfigError, match=match):
        choose_format(pa.schema([("tokens", kind)]), **wanted)


@pytest.mark.parametrize("kind", [FIXED[0], RAGGED[0]])
def test_a_null_inside_a_block_is_refused(kind):
    batch = pa.record_batch({"tokens": pa.array([[1, None, 3, 4, 5]], kind)})
    with pytest.raises(ConfigError, match="lists with null in them"):
        StoredBlocks([batch], choose_format(batch.schema, "tokens", BLOCK, None))
