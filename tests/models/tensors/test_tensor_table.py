import dataclasses
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.tensors import tensor_table
from datasvc.models.tensors.chunks import plan_chunks
from datasvc.models.tensors.tensor_table import (
    DIFFERENCES,
    ITEM_BYTES,
    STANDALONE,
    ChainLink,
    Chunk,
    TensorRecord,
    decode_table,
    digest_of_content,
    encode_table,
    join_chunks,
)
from datasvc.repository import Digest
from tests.examples import examples
from tests.support.fuzzing import counts_refusals

digests = st.binary(min_size=32, max_size=32).map(lambda raw: Digest(raw.hex()))


@st.composite
def chains(draw, size):
    links = []
    for number in range(draw(st.integers(1, 3))):
        encoding = draw(st.sampled_from(DIFFERENCES if number else STANDALONE))
        length = size if encoding == "raw" else draw(st.integers(1, size))
        offset = draw(st.integers(0, 100))
        links.append(ChainLink(draw(digests), offset + length + draw(st.integers(0, 9)), offset, length, encoding))
    return tuple(links)


@st.composite
def tables(draw):
    names = draw(st.lists(st.text(max_size=8), unique=True, max_size=4))
    found = []
    for name in sorted(names):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
        item_bytes = ITEM_BYTES[dtype]
        chunks = []
        for start, size in plan_chunks(shape, item_bytes, chunk_bytes=draw(st.integers(16, 200))):
            count = item_bytes
            for each in size:
                count *= each
            chunks.append(Chunk(start, size, draw(digests), draw(chains(count))))
        found.append(TensorRecord(name, dtype, shape, tuple(chunks)))
    return tuple(found)


@given(tables())
def test_a_table_comes_back_and_equal_records_give_equal_bytes(table):
    encoded = encode_table(table)
    assert decode_table(encoded, "here") == table
    assert encode_table(reversed(table)) == encoded


@given(tables())
def test_chunks_travel_as_json(table):
    for record in table:
        for chunk in record.chunks:
            assert Chunk.from_json(json.loads(json.dumps(chunk.to_json()))) == chunk


@pytest.mark.parametrize("value", [None, [], {}, {"start": [0], "shape": [1], "digest": "../../x", "chain": []}])
def test_other_json_is_no_chunk(value):
    with pytest.raises(CorruptDataError, match=r"not a chunk|not a digest"):
        Chunk.from_json(value)


RAW = ChainLink(Digest("01" * 32), 24, 0, 24, "raw")
PLANES = dataclasses.replace(RAW, length=20, encoding="planes")
DIFFERENCE = dataclasses.replace(PLANES, encoding="difference")
CHUNK = Chunk((0, 0), (2, 3), Digest("02" * 32), (RAW,))
RECORD = TensorRecord("model.w", "float32", (2, 3), (CHUNK,))


def with_chain(*chain, **changes):
    return dataclasses.replace(RECORD, chunks=(dataclasses.replace(CHUNK, chain=chain, **changes),))


def link(**changes):
    return dataclasses.replace(RAW, **changes)


HOSTILE = {
    "negative shape": dataclasses.replace(RECORD, shape=(-2, -3)),
    "giant shape": dataclasses.replace(RECORD, shape=(2**40, 2**40)),
    "giant empty shape": TensorRecord("t", "float32", (0, 2**62, 2**62), ()),
    "absurd dimensions": TensorRecord("t", "float32", (1,) * 100, ()),
    "no chunk": dataclasses.replace(RECORD, chunks=()),
    "overlapping chunks": dataclasses.replace(RECORD, chunks=(CHUNK, CHUNK)),
    "overlapping chunks that add up": TensorRecord(
        "t", "uint8", (48,), tuple(Chunk((start,), (24,), Digest("02" * 32), (RAW,)) for start in (0, 12))
    ),
    "chunk outside": with_chain(RAW, start=(1, 0)),
    "chunk of another rank": with_chain(RAW, start=(0,), shape=(6,)),
    "no link": with_chain(),
    "endless chain": with_chain(PLANES, *[DIFFERENCE] * 64),
    "difference to nothing": with_chain(DIFFERENCE),
    "raw behind raw": with_chain(RAW, RAW),
    "unknown encoding": with_chain(link(encoding="pickle")),
    "too short": with_chain(link(length=23)),
    "too long": with_chain(link(length=25, object_bytes=25)),
    "nothing compressed": with_chain(link(length=0, encoding="planes")),
    "offset outside": with_chain(link(offset=1)),
    "negative offset": with_chain(link(offset=-1)),
    "bomb": TensorRecord(
        "t", "uint8", (1 << 30,), (Chunk((0,), (1 << 30,), Digest("02" * 32), (link(length=20, encoding="planes"),)),)
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_table_that_says_what_cannot_be_is_refused_and_the_tensor_named(case):
    name = HOSTILE[case].name
    with pytest.raises(CorruptDataError, match=f"there.*tensor '{name}'"):
        decode_table(encode_table([HOSTILE[case]]), "there")


def test_names_that_come_twice_are_refused():
    with pytest.raises(CorruptDataError, match="not sorted by name"):
        decode_table(encode_table([RECORD, RECORD]), "there")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="unknown dtype '__class__'"):
        decode_table(encode_table([dataclasses.replace(RECORD, dtype="__class__")]), "there")


def rewritten(schema=None, options=None, rows=None):
    table = pa.ipc.open_file(pa.py_buffer(encode_table([RECORD]))).read_all()
    table = table if schema is None else table.replace_schema_metadata(schema)
    table = table if rows is None else rows(table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=options) as file:
        file.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_table_that_arrow_would_decompress_is_refused(compression):
    with pytest.raises(CorruptDataError, match="compressed"):
        decode_table(rewritten(options=pa.ipc.IpcWriteOptions(compression=compression)), "there")


def test_a_batch_that_only_the_footer_names_is_not_read():
    """What is looked at for compression is what is read, wherever else the file points to."""
    plain = encode_table([RECORD])
    other = encode_table([dataclasses.replace(RECORD, name="other")])
    footer_bytes = int.from_bytes(other[-10:-6], "little") + 10
    swapped = plain[: -(int.from_bytes(plain[-10:-6], "little") + 10)] + other[-footer_bytes:]
    assert decode_table(swapped, "here") == (RECORD,)
    assert decode_table(plain[: -footer_bytes // 2], "here") == (RECORD,)


def test_a_table_of_a_later_format_is_refused():
    later = rewritten({tensor_table._METADATA_KEY: b"3"})
    with pytest.raises(ConfigError, match="there has tensor format 3; this datasvc reads up to 2"):
        decode_table(later, "there")


@pytest.mark.parametrize("metadata", [{}, {b"datasvc.tensors.format": b"x"}, {b"datasvc.tensors.format": b"-1"}])
def test_what_says_no_format_or_has_other_columns_is_no_table(metadata):
    for content in (rewritten(metadata), rewritten(rows=lambda table: table.drop(["pieces"])), b"", b"ARROW1\0\0"):
        with pytest.raises(CorruptDataError, match="there is not a valid tensor table"):
            decode_table(content, "there")


@counts_refusals(CorruptDataError, ConfigError)
@given(st.data())
@examples(200)
def test_a_damaged_table_raises_one_of_our_errors_or_is_a_table(data):
    content = bytearray(encode_table([RECORD, dataclasses.replace(RECORD, name="x")]))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    stop = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    decode_table(bytes(content[:stop]), "there")


def test_ranks_join_their_chunks_in_any_order_and_a_missing_one_is_said():
    left, right = (
        Chunk((0, start), (2, size), Digest("02" * 32), (link(length=8 * size, object_bytes=8 * size),))
        for start, size in ((0, 1), (1, 2))
    )
    joined = join_chunks("w", "float32", (2, 3), [right, left])
    assert joined.chunks == (left, right)
    with pytest.raises(ConfigError, match=r"'w'.*leave out elements or hold some twice"):
        join_chunks("w", "float32", (2, 3), [right])


def test_the_content_is_the_same_however_it_is_stored():
    stored_otherwise = with_chain(PLANES, DIFFERENCE)
    assert digest_of_content([RECORD]) == digest_of_content([stored_otherwise])
    for other in (
        [],
        [dataclasses.replace(RECORD, name="v")],
        [dataclasses.replace(RECORD, dtype="int32")],
        [with_chain(RAW, digest=Digest("03" * 32))],
    ):
        assert digest_of_content(other) != digest_of_content([RECORD])
