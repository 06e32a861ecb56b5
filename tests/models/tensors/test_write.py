import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.tensors import chunk_writer
from datasvc.models.tensors.chunk_writer import find_chain, pointer_path
from datasvc.models.tensors.codec import try_encodings
from datasvc.models.tensors.dtypes import bytes_of
from datasvc.models.tensors.read import load_chunk, load_tensors, load_window
from datasvc.models.tensors.tensor_table import ITEM_BYTES, ChainLink, Chunk, TensorRecord, join_chunks
from datasvc.models.tensors.write import TensorBlock, store_chunks, store_tensors, whole_blocks
from datasvc.repository import Objects, Repository, Storage
from datasvc.repository.logs.log import decode_entry, encode_entry
from datasvc.repository.objects.objects import digest_of
from tests.examples import examples
from tests.progress import RecordedProgress
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store

BIG = 50_000  # elements: more than the 64 KiB that have an object of their own, encoded too


def files(objects):
    return sorted(path for path in Path(objects.storage.url, "objects").rglob("*") if path.is_file())


def size_of(objects):
    return sum(path.stat().st_size for path in files(objects))


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def weights(seed=0, count=BIG):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02


def later(tensor, seed=1, scale=1e-5):
    return tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * scale


def chain_of(stored, name="w"):
    (record,) = [record for record in stored.records if record.name == name]
    (chunk,) = record.chunks
    return [link.encoding for link in chunk.chain]


@pytest.fixture
def objects(repository):
    return repository.objects


@pytest.fixture
def anywhere(url):  # noqa: F811
    return Repository.create(url)


@pytest.fixture(scope="module")
def shared_objects(tmp_path_factory):
    return Repository.create(str(tmp_path_factory.mktemp("store") / "repo")).objects


@st.composite
def tensors(draw, shape=None, dtype=None):
    shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple)) if shape is None else shape
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES))) if dtype is None else dtype
    count = math.prod(shape) * ITEM_BYTES[dtype]
    raw = torch.randint(0, draw(st.sampled_from([2, 256])), (count,), dtype=torch.uint8)
    return (
        raw.view(getattr(torch, dtype)).reshape(shape) if count else torch.empty(shape, dtype=getattr(torch, dtype))
    )


@given(st.data(), st.sampled_from(["none", "planes", "delta"]), st.integers(16, 300))
@examples(60)
def test_any_tensors_come_back_bit_by_bit_however_they_are_cut_and_stored(shared_objects, data, codec, chunk_bytes):
    torch.manual_seed(data.draw(st.integers(0, 5)))
    first = {name: data.draw(tensors()) for name in data.draw(st.sets(st.sampled_from("abc")))}
    second = {name: data.draw(tensors(tuple(each.shape), str(each.dtype)[6:])) for name, each in first.items()}
    before = store_tensors(shared_objects, first, codec=codec, chunk_bytes=chunk_bytes)
    after = store_tensors(shared_objects, second, base=before.records, codec=codec, chunk_bytes=chunk_bytes)
    for wanted, stored in ((first, before), (second, after)):
        found = load_tensors(shared_objects, stored.records)
        assert list(found) == sorted(wanted)
        assert all(same_bits(found[name], wanted[name]) for name in wanted)
        for record in stored.records:
            for chunk in record.chunks:
                window = load_window(shared_objects, record, chunk.start, chunk.shape)
                assert same_bits(window, load_chunk(shared_objects, record.dtype, chunk))


@given(st.data())
@examples(40)
def test_a_window_is_what_slicing_gives_and_reads_only_the_chunks_that_it_meets(shared_objects, data):
    tensor = torch.arange(6 * 5 * 4, dtype=torch.int32).reshape(6, 5, 4)
    (record,) = store_tensors(shared_objects, {"w": tensor}, chunk_bytes=data.draw(st.integers(8, 600))).records
    start = tuple(data.draw(st.integers(0, size)) for size in tensor.shape)
    shape = tuple(data.draw(st.integers(0, size - s)) for size, s in zip(tensor.shape, start, strict=True))
    index = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
    assert torch.equal(load_window(shared_objects, record, start, shape), tensor[index])


def test_a_window_outside_is_refused_and_chunks_apart_from_it_are_not_read(objects):
    tensor = weights(count=2 * BIG).reshape(2, BIG)
    (record,) = store_tensors(objects, {"w": tensor}, codec="none", chunk_bytes=4 * BIG).records
    objects.local_path(record.chunks[0].chain[0].object).unlink()
    assert torch.equal(load_window(objects, record, (1, 3), (1, 5)), tensor[1:, 3:8])
    with pytest.raises(NotFoundError, match="tensor 'w' is missing"):
        load_window(objects, record, (0, 3), (2, 5))
    with pytest.raises(ConfigError, match=r"has no block \(1, 1\) at \(2, 0\)"):
        load_window(objects, record, (2, 0), (1, 1))


def test_chunks_that_ranks_cut_along_any_dimension_make_up_the_tensor(objects):
    tensor = torch.arange(6 * 8, dtype=torch.float32).reshape(6, 8)
    ranks = [
        store_chunks(objects, [TensorBlock("w", start, tensor[start[0] : start[0] + 3, start[1] : start[1] + 4])])
        for start in ((0, 0), (0, 4), (3, 0), (3, 4))
    ]
    record = join_chunks("w", "float32", (6, 8), [chunk for rank in reversed(ranks) for _, chunk in rank.chunks])
    assert torch.equal(load_tensors(objects, [record])["w"], tensor)
    assert torch.equal(load_window(objects, record, (2, 3), (2, 2)), tensor[2:4, 3:5])


def test_a_difference_is_stored_where_it_is_smaller_and_the_chain_ends_in_time(objects, monkeypatch):
    monkeypatch.setattr(chunk_writer, "MAX_CHAIN_LENGTH", 3)
    state, records, encodings = weights(), (), []
    for step in range(10):
        stored = store_tensors(objects, {"w": state}, base=records)
        assert torch.equal(load_tensors(objects, stored.records)["w"], state)
        encodings.append(chain_of(stored))
        records, state = stored.records, later(state, step, 1e-9)
    assert [len(chain) for chain in encodings] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert {chain[0] for chain in encodings} == {"planes"}


@pytest.mark.parametrize(("scale", "longest"), [(1e-4, 2), (1e-6, 2), (1e-9, 3)])
def test_a_restore_costs_at_most_2_7_chunks_where_to_decode_a_link_counts_as_half_of_one(objects, scale, longest):
    state, records, chains = weights(), (), []
    for step in range(7):
        stored = store_tensors(objects, {"w": state}, base=records)
        records, state = stored.records, later(state, step, scale)
        chunk = records[0].chunks[0]
        chains.append(len(chunk.chain))
        assert chunk.stored_bytes / state.nbytes + len(chunk.chain) / 2 <= 2.7
    assert max(chains) == longest


def test_noise_is_stored_as_it_is_and_nothing_as_a_difference_to_what_it_does_not_continue(objects):
    noise = torch.randint(-(1 << 31), 1 << 31, (BIG,), dtype=torch.int64).to(torch.int32)
    first = store_tensors(objects, {"w": noise})
    assert chain_of(first) == ["raw"]
    assert chain_of(store_tensors(objects, {"w": weights().view(torch.int32)}, base=first.records)) == ["planes"]


def test_a_difference_that_looks_small_in_a_sample_and_is_not_is_not_stored(objects):
    before = weights(count=2 << 20)
    after = weights(1, count=2 << 20)
    size = after.numel() - (8 << 10)
    for number in range(4):  # what the sample consists of
        run = slice(size * number // 3, size * number // 3 + (8 << 10))
        after[run] = before[run]
    first = store_tensors(objects, {"w": before})
    assert try_encodings(bytes_of(after), 4, bytes_of(before))["xor"].share < 0.01
    assert chain_of(store_tensors(objects, {"w": after}, base=first.records)) == ["planes"]


def test_frozen_tensors_cost_nothing_and_keep_their_objects(objects):
    frozen, head = weights(), weights(1, 100)
    first = store_tensors(objects, {"frozen": frozen, "head": head})
    second = store_tensors(objects, {"frozen": frozen, "head": later(head)}, base=first.records)
    assert second.new_bytes <= 4 * 100
    assert second.records[0].chunks == first.records[0].chunks
    assert store_tensors(objects, {"frozen": frozen, "head": head}, base=first.records).new_bytes == 0


@pytest.mark.parametrize("codec", ["none", "planes", "delta"])
def test_equal_tensors_of_another_model_are_stored_once_whatever_they_were_stored_as(objects, codec):
    first, second = weights(), later(weights())
    base = store_tensors(objects, {"w": first}, codec=codec)
    changed = store_tensors(objects, {"w": second}, base=base.records, codec=codec)
    assert len(chain_of(changed)) == (2 if codec == "delta" else 1)
    other = store_tensors(objects, {"x": second, "y": second.clone(), "z": first}, codec="delta")
    assert other.new_bytes == 0
    found = load_tensors(objects, other.records)
    assert torch.equal(found["y"], second)
    assert torch.equal(found["z"], first)


def test_equal_tensors_of_one_save_are_stored_once(objects):
    twins = {f"{number}": weights(count=20 * BIG) for number in range(8)}
    stored = store_tensors(objects, twins, codec="none", chunk_bytes=80 * BIG)
    assert stored.new_bytes == size_of(objects) == 80 * BIG
    assert all(torch.equal(each, twins["0"]) for each in load_tensors(objects, stored.records).values())


def test_a_pointer_that_is_larger_than_any_is_not_read(repository):
    objects = repository.objects
    digest = digest_of(b"a chunk")
    path = Path(objects.storage.url, pointer_path(digest))
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, 1 << 40)
    assert find_chain(objects, digest, 7) is None


def test_a_pointer_to_what_is_gone_or_damaged_is_not_followed(objects):
    first, second = weights(), later(weights())
    base = store_tensors(objects, {"w": first})
    changed = store_tensors(objects, {"w": second}, base=base.records)
    pointer = Path(objects.storage.url, pointer_path(changed.records[0].chunks[0].digest))
    whole = pointer.read_bytes()
    content = decode_entry(whole, "")
    for damage in (
        whole.replace(b'"offset": 0', b'"offset": 1'),
        encode_entry({**content, "chain": content["chain"][1:]}),
        encode_entry({**content, "digest": "00" * 32}),
        encode_entry({**content, "chain": [{**content["chain"][0], "length": "x"}]}),
    ):
        pointer.write_bytes(damage)
        stored = store_tensors(objects, {"x": second}, codec="planes")
        assert torch.equal(load_tensors(objects, stored.records)["x"], second)
        assert chain_of(stored, "x") == ["planes"]
    pointer.write_bytes(whole)
    objects.local_path(changed.records[0].chunks[0].chain[0].object).unlink()
    again = store_tensors(objects, {"x": second}, codec="none")
    assert chain_of(again, "x") == ["raw"]
    assert torch.equal(load_tensors(objects, again.records)["x"], second)


def test_equal_bytes_of_another_dtype_are_shared_and_read_as_their_own(objects):
    tensor = weights()
    stored = store_tensors(objects, {"f": tensor, "i": tensor.view(torch.int64), "b": tensor.view(torch.uint8)})
    assert len({record.chunks[0].digest for record in stored.records}) == 1
    found = load_tensors(objects, stored.records)
    assert torch.equal(found["i"], tensor.view(torch.int64))
    further = store_tensors(objects, {"i": later(tensor).view(torch.int64)}, base=stored.records)
    assert torch.equal(load_tensors(objects, further.records)["i"].view(torch.float32), later(tensor))


def test_on_every_store_versions_are_stored_as_differences_and_equal_chunks_once(anywhere):
    objects, first, second = anywhere.objects, weights(), later(weights())
    base = store_tensors(objects, {"w": first, "small": first[:9]})
    changed = store_tensors(objects, {"w": second, "small": first[:9]}, base=base.records)
    assert 0 < changed.new_bytes < base.new_bytes
    assert store_tensors(objects, {"x": second, "y": first}).new_bytes == 0
    found = load_tensors(objects, changed.records)
    assert torch.equal(found["w"], second)
    assert torch.equal(found["small"], first[:9])


def test_what_was_lost_of_an_earlier_version_is_stored_again(objects):
    tensor = weights()
    first = store_tensors(objects, {"w": tensor})
    for path in files(objects):
        path.unlink()
    second = store_tensors(objects, {"w": tensor}, base=first.records)
    assert torch.equal(load_tensors(objects, second.records)["w"], tensor)
    for path in files(objects):
        path.write_bytes(b"\0" * path.stat().st_size)
    third = store_tensors(objects, {"w": later(tensor)}, base=second.records)
    assert len(chain_of(third)) == 1
    assert torch.equal(load_tensors(objects, third.records)["w"], later(tensor))


def test_a_base_in_memory_is_used_in_place_of_a_read_and_only_where_it_is_the_base(objects):
    first, second = weights(), later(weights())
    base = store_tensors(objects, {"w": first})
    for path in files(objects):
        path.write_bytes(b"\0" * path.stat().st_size)  # of the same size: it seems to be there
    for state, in_memory, num_links in ((second, first, 2), (later(second), second, 1)):
        ((_, chunk),) = store_chunks(
            objects, whole_blocks({"w": state}), base=base.records, base_tensors=whole_blocks({"w": in_memory})
        ).chunks
        assert len(chunk.chain) == num_links


def test_nan_and_infinities_are_counted(objects):
    nan, infinity = float("nan"), float("inf")
    state = {
        "nan": torch.tensor([nan, 1.0, -infinity]), "large": torch.full((9,), 3e38),
        "half": torch.tensor([65504.0, -infinity] * 8).half(),
        "brain": torch.tensor([3e38, nan, -infinity]).bfloat16(),
        "eighth": torch.tensor([nan, 448.0]).to(torch.float8_e4m3fn),
        "fifth": torch.tensor([57344.0, infinity]).to(torch.float8_e5m2),
        "complex": torch.tensor([complex(1, nan), complex(nan, nan), complex(1, 1)]).conj(),
        "wide": torch.tensor([[1.0, nan]], dtype=torch.float64).t(),
        "late": torch.arange(300_000.0).index_fill(0, torch.tensor([299_999]), nan),
        "int": torch.tensor([-1, 0x7F80_0000]), "empty": torch.empty(0),
    }  # fmt: skip
    assert dict(store_tensors(objects, state).num_nonfinite) == {
        "brain": 2, "complex": 2, "eighth": 1, "fifth": 1, "half": 8, "late": 1, "nan": 2, "wide": 1
    }  # fmt: skip


def test_progress_is_reported_in_bytes(objects):
    state, progress = {"a": weights(), "b": weights(1, 10)}, RecordedProgress()
    stored = store_tensors(objects, state, progress=progress, chunk_bytes=100_000)
    assert progress.total == BIG * 4 + 40
    load_tensors(objects, stored.records, progress=progress)
    assert progress.total == 2 * (BIG * 4 + 40)


def test_an_unknown_codec_and_tensors_without_bytes_are_refused(objects):
    with pytest.raises(ConfigError, match="codec is 'zip'; expected one of none, planes, delta"):
        store_tensors(objects, {}, codec="zip")
    for tensor in (
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ):
        with pytest.raises(ConfigError, match="tensor 's'"):
            store_tensors(objects, {"s": tensor})


@pytest.fixture
def chained(objects):
    """Two versions of a large tensor and two small ones, the second stored as differences."""
    state = {"w": weights(), "a": weights(1, 3000), "b": weights(2, 3000)}
    base = store_tensors(objects, state)
    return store_tensors(objects, {name: later(each) for name, each in state.items()}, base=base.records)


@pytest.mark.parametrize("name", ["w", "a", "b"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_flipped_bit_in_any_link_names_the_tensor_and_the_object(objects, chained, name, number):
    (record,) = [record for record in chained.records if record.name == name]
    assert len(record.chunks[0].chain) == 2
    link = record.chunks[0].chain[number]
    path = objects.local_path(link.object)
    raw = bytearray(path.read_bytes())
    raw[link.offset + link.length // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptDataError, match=f"tensor '{name}' is corrupt: the bytes in .*{link.object}"):
        load_tensors(objects, [record])


class TwoCopies:
    """Two repositories that lie beside each other; what is read first is damaged."""

    def __init__(self, first, second):
        self.places = first, second

    def read_range(self, digest, offset, length):
        return self.places[0].read_range(digest, offset, length)

    def location(self, digest):
        return self.places[0].location(digest)

    def copies(self, digest, offset, length):
        for place in self.places:
            yield from place.copies(digest, offset, length)


def test_what_is_damaged_in_one_copy_is_read_from_another(objects, chained, tmp_path):
    whole = Objects(Storage(str(tmp_path / "other")))
    for path in files(objects):
        whole.put(path.read_bytes())
        path.write_bytes(os.urandom(path.stat().st_size))
    found = load_tensors(TwoCopies(objects, whole), chained.records)
    assert torch.equal(found["w"], later(weights()))
    for path in files(whole):
        path.unlink()
    with pytest.raises(CorruptDataError, match="is corrupt"):
        load_tensors(TwoCopies(objects, whole), chained.records)


def test_a_table_that_names_other_bytes_is_corrupt_and_the_tensor_named(objects):
    info = objects.put(b"\0" * 8)
    chunk = Chunk((0,), (2,), objects.put(b"\1" * 8).digest, (ChainLink(info.digest, 8, 0, 8, "raw"),))
    with pytest.raises(
        CorruptDataError, match=r"tensor 't' is corrupt: .*do not decode to the bytes in its tensor table"
    ):
        load_tensors(objects, [TensorRecord("t", "float32", (2,), (chunk,))])


def test_a_tensor_that_claims_more_than_is_stored_is_refused_before_memory_is_taken(objects):
    info = objects.put(b"\0" * 8)
    size = 1 << 45
    chunk = Chunk((0,), (size,), info.digest, (ChainLink(info.digest, size, 0, size, "raw"),))
    with pytest.raises(CorruptDataError, match="tensor 't' is corrupt"):
        load_tensors(objects, [TensorRecord("t", "uint8", (size,), (chunk,))])
    with pytest.raises(CorruptDataError, match="tensor 't' is corrupt"):
        load_chunk(objects, "uint8", chunk, name="t")


def test_a_difference_that_is_larger_than_its_sample_promised_is_not_stored(repository):
    """Where it was sampled the tensor is as before; all else of it is noise now."""
    size, run = 1 << 20, 32 << 10
    chance = np.random.default_rng(0)
    before = chance.integers(0, 40, size, np.uint8)
    after = chance.integers(0, 256, size, np.uint8)
    for start in [(size - run) * number // 3 for number in range(4)]:
        after[start : start + run] = before[start : start + run]
    first = store_tensors(repository.objects, {"buf": torch.from_numpy(before)}, codec="delta")
    second = store_tensors(repository.objects, {"buf": torch.from_numpy(after)}, base=first.records, codec="delta")
    (chunk,) = second.records[0].chunks
    assert [link.encoding for link in chunk.chain] in (["raw"], ["planes"])
    loaded = load_tensors(repository.objects, second.records)
    assert torch.equal(loaded["buf"], torch.from_numpy(after))


def test_tiny_tensors_that_are_stored_together_stay_separate(objects):
    """Views, parameters, equal and empty tensors, with and without NaN, beside tensors that are stored alone."""
    grid = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "a.nan": torch.tensor([1.0, math.nan, math.inf]),
        "b.transposed": grid.T,
        "c.parameter": torch.nn.Parameter(torch.ones(3)),
        "d.equal": torch.ones(3),
        "e.negated": torch.complex(torch.zeros(3), torch.ones(3)).conj().imag,
        "f.empty": torch.empty(0, 3),
        "g.number": torch.tensor(-0.0),
        "h.half": torch.tensor([math.nan], dtype=torch.bfloat16),
        "i.large": weights(),
        "j.int": torch.arange(3),
        "k.bool": torch.tensor([True, False]),
        "l.complex": torch.tensor([1j]).conj(),
        "m.nan": torch.full((2,), math.nan),
    }
    stored = store_tensors(objects, tensors)
    assert stored.num_nonfinite == {"a.nan": 2, "h.half": 1, "m.nan": 2}
    loaded = load_tensors(objects, stored.records)
    assert loaded.keys() == tensors.keys()
    assert all(
        same_bits(loaded[name], tensor.detach().resolve_conj().resolve_neg()) for name, tensor in tensors.items()
    )
    digests = {record.name: [chunk.digest for chunk in record.chunks] for record in stored.records}
    assert digests["c.parameter"] == digests["d.equal"] == [digest_of(bits(torch.ones(3)))]
    again = store_tensors(objects, tensors, base=stored.records)
    assert (again.records, again.new_bytes) == (stored.records, 0)
