import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import CorruptDataError
from datasvc.models.tensors.codec import (
    _BLOCK_WORDS,
    ChainDecoder,
    Decoders,
    encode,
    is_worthwhile,
    join,
    split,
    try_encodings,
    word_bytes,
)
from datasvc.models.tensors.tensor_table import ITEM_BYTES
from tests.examples import examples
from tests.support.fuzzing import counts_refusals

WORDS = [1, 2, 4, 8]
# Around the blocks that pass through at once, and less than a sample.
counts = st.sampled_from([0, 1, 2, 3, 7, 1000, (32 << 10) - 1, 32 << 10, (32 << 10) + 1, 70_001])


@st.composite
def contents(draw, count, word):
    """Return bytes of whole words: noise, constants, and numbers that differ little."""
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    kind = draw(st.sampled_from(["noise", "constant", "weights", "steps"]))
    if kind == "noise":
        return rng.integers(0, 256, count * word, np.uint8)
    if kind == "constant":
        return np.full(count * word, draw(st.integers(0, 255)), np.uint8)
    if kind == "steps":
        return np.arange(count, dtype=np.uint64).astype(f"u{word}").view(np.uint8)
    return rng.normal(size=(count * word + 3) // 4).astype(np.float32).view(np.uint8)[: count * word].copy()


@st.composite
def chains(draw):
    """Return contents of one size, each encoded as the difference to the one before, in words of any size."""
    word = draw(st.sampled_from(WORDS))
    count = draw(counts)
    links, before = [], None
    for number in range(draw(st.integers(1, 3))):
        content = draw(contents(count, word))
        encoding = draw(st.sampled_from(["xor", "difference"] if number else ["raw", "planes"]))
        own_word = draw(st.sampled_from([each for each in WORDS if each <= word]))
        stored = content.tobytes() if encoding == "raw" else encode(content, own_word, encoding, before)
        links.append((encoding, stored))
        before = content
    return links, before


def decoded(links, size):
    out = np.full(size, 0xA5, np.uint8)
    ChainDecoder().decode(links, out)
    return out


@given(chains())
@examples(150)
def test_what_a_chain_of_any_encodings_gives_is_what_went_in(chain):
    links, content = chain
    assert decoded(links, content.size).tobytes() == content.tobytes()


def test_complex_numbers_are_words_of_half_their_size():
    assert {dtype: word_bytes(dtype) for dtype in ITEM_BYTES if word_bytes(dtype) != ITEM_BYTES[dtype]} == {
        "complex32": 2,
        "complex64": 4,
        "complex128": 8,
    }


def trained(seed=0, count=200_000):
    """Weights, and what they are some steps later."""
    rng = np.random.default_rng(seed)
    before = (rng.normal(size=count) * 0.02).astype(np.float32)
    after = before + (rng.normal(size=count) * 1e-5).astype(np.float32)
    return before.view(np.uint8), after.view(np.uint8)


def test_weights_that_change_little_are_stored_as_a_difference_and_take_less():
    before, after = trained()
    alone, difference = encode(after, 4, "planes"), encode(after, 4, "difference", before)
    assert len(difference) < 0.75 * len(alone) < 0.75 * after.size
    shares = {name: trial.share for name, trial in try_encodings(after, 4, before).items()}
    assert shares["difference"] < shares["planes"] - 0.1 < 0.8
    assert (
        shares["planes"]
        == try_encodings(after, 4)["planes"].share
        == pytest.approx(len(alone) / after.size, abs=0.01)
    )
    assert shares["difference"] == pytest.approx(len(difference) / after.size, abs=0.02)


def test_what_is_small_is_encoded_once_as_a_whole():
    before, after = trained(count=5_000)
    trials = try_encodings(after, 4, before)
    assert {name: trial.stored for name, trial in trials.items()} == {
        "planes": encode(after, 4, "planes"),
        "xor": encode(after, 4, "xor", before),
        "difference": encode(after, 4, "difference", before),
    }
    large = try_encodings(np.tile(after, 20), 4)
    assert large["planes"].stored is None


def test_noise_gains_nothing_nor_does_what_does_not_continue_its_base():
    noise = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    _, after = trained()
    assert not any(is_worthwhile(trial.share) for trial in try_encodings(noise, 4, noise[::-1].copy()).values())
    trials = try_encodings(after, 4, noise[: after.size])
    assert min(trials, key=lambda encoding: trials[encoding].share) == "planes"
    assert not is_worthwhile(len(encode(noise, 4, "planes")) / noise.size)


def test_a_sign_that_changes_back_and_forth_leaves_upper_planes_empty():
    before = np.arange(1000, 2000, dtype=np.int32)
    after = before + np.where(np.arange(1000) % 2, 1, -1).astype(np.int32)
    assert len(encode(after.view(np.uint8), 4, "difference", before.view(np.uint8))) < 120


def planes_of(*planes, word=None):
    word = len(planes) if word is None else word
    return bytes([word]) + b"".join(len(plane).to_bytes(4, "little") for plane in planes) + b"".join(planes)


BOMB = zstandard.ZstdCompressor().compress(bytes(64 << 20))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\x04",
        planes_of(bytes(100)),
        planes_of(bytes(1000), word=3),
        planes_of(bytes(1000), word=0),
        planes_of(bytes(1000))[:-1],
        planes_of(bytes(1000)) + b"x",
        planes_of(b"not zstd"),
        planes_of(b""),
        planes_of(BOMB),
        planes_of(UNSIZED),
        planes_of(zstandard.ZstdCompressor().compress(bytes(1000)) + b"more"),
        planes_of(zstandard.ZstdCompressor().compress(bytes(1000))[:-1]),
    ],
)
def test_what_is_no_planes_of_that_size_is_damage_and_never_more_memory(stored):
    out = np.zeros(1000, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError):
            ChainDecoder().decode([("planes", stored)], out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_raw_bytes_of_another_size_are_damage():
    with pytest.raises(CorruptDataError, match="10 bytes where 12"):
        ChainDecoder().decode([("raw", bytes(10))], np.zeros(12, np.uint8))


@counts_refusals(CorruptDataError)
@given(st.data())
def test_damaged_planes_raise_or_give_other_bytes_and_nothing_else(data):
    before, after = (each[:4000] for each in trained(count=1000))
    links = [("planes", encode(before, 4, "planes")), ("difference", encode(after, 4, "difference", before))]
    number = data.draw(st.integers(0, 1))
    stored = bytearray(links[number][1])
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    stop = data.draw(st.just(len(stored)) | st.integers(0, len(stored)))
    links[number] = (links[number][0], bytes(stored[:stop]))
    decoded(links, after.size)


def test_a_decoder_gives_the_same_whatever_it_decoded_before():
    decoder = ChainDecoder()
    for count in (200_000, 1000, 300_000):
        before, after = trained(count, count)
        out = np.empty(after.size, np.uint8)
        decoder.decode([("planes", encode(before, 4, "planes")), ("xor", encode(after, 4, "xor", before))], out)
        assert out.tobytes() == after.tobytes()
        with pytest.raises(CorruptDataError):
            decoder.decode([("planes", planes_of(b"not zstd"))], out)


def test_no_more_threads_decode_at_once_than_there_are_decoders_and_those_are_used_again():
    decoders, used = Decoders(2), []

    def borrow():
        with decoders.borrow() as decoder:
            used.append(decoder)

    with decoders.borrow() as first:
        with decoders.borrow() as second:
            third = threading.Thread(target=borrow)
            third.start()
            assert not decoders._permits.acquire(blocking=False)  # nor does the third get one, now or later
            assert not used
        third.join()
    borrow()
    assert used == [second, first]


# Around the words that pass through at once.
num_words = st.sampled_from([0, 1, 5, _BLOCK_WORDS - 1, _BLOCK_WORDS, 2 * _BLOCK_WORDS + 3])


@given(st.sampled_from([1, 2, 4, 8]), num_words, st.sampled_from(["planes", "xor", "difference"]), st.integers(0, 9))
def test_planes_that_are_joined_give_the_words_that_were_split(word, count, encoding, seed):
    content, base = np.random.default_rng(seed).integers(0, 256, (2, count * word), np.uint8)
    planes = split(content, word, encoding, base)
    assert planes.shape == (word, count)
    out = base.copy()
    join(list(planes), encoding, out)
    assert out.tobytes() == content.tobytes()


@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_a_plane_has_one_byte_of_every_word_lowest_first(word):
    content = np.arange(3 * word, dtype=np.uint8)
    assert np.array_equal(split(content, word, "planes"), content.reshape(3, word).T)


@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_differences_have_their_sign_in_the_lowest_bit_and_wrap_around(word):
    base = np.array([5, 5, 0], f"<u{word}").view(np.uint8)
    content = np.array([6, 4, (1 << 8 * word) - 1], f"<u{word}").view(np.uint8)
    assert split(content, word, "difference", base)[0].tolist() == [2, 1, 1]


@pytest.mark.parametrize("encoding", ["planes", "xor", "difference"])
@pytest.mark.parametrize("word", [2, 4, 8])
def test_words_that_lie_unaligned_in_memory_are_joined_like_others(encoding, word):
    content, base = np.random.default_rng(0).integers(0, 256, (2, 4000), np.uint8)
    planes = split(content, word, encoding, base)
    memory = np.zeros(4001, np.uint8)
    memory[1:] = base
    join(list(planes), encoding, memory[1:])
    assert memory[1:].tobytes() == content.tobytes()
