import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.models.tensors.byte_planes import _BLOCK_WORDS, join, split

# Around the words that pass through at once.
counts = st.sampled_from([0, 1, 5, _BLOCK_WORDS - 1, _BLOCK_WORDS, 2 * _BLOCK_WORDS + 3])


@given(st.sampled_from([1, 2, 4, 8]), counts, st.sampled_from(["planes", "xor", "difference"]), st.integers(0, 9))
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
