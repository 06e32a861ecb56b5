import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.keyed_random import KeyedPermutation, derive_keys, uniform, uniforms

sizes = st.integers(1, 3000)
words = st.integers(0, 2**64 - 1)


@given(sizes, words, words, st.none() | st.integers(0, 2**40))
def test_a_keyed_permutation_permutes_and_its_inverse_inverts(size, seed, epoch, tweak):
    permutation = KeyedPermutation(size, derive_keys(seed, epoch, 1, KeyedPermutation.num_keys))
    values, tweaks = np.arange(size), () if tweak is None else (np.full(size, tweak),)
    mapped = permutation.permute(values, *tweaks)
    assert np.array_equal(np.sort(mapped), values)
    assert np.array_equal(permutation.invert(mapped, *tweaks), values)


def test_large_ranges_are_mapped_in_range_and_back():
    size = (1 << 62) - 3
    permutation = KeyedPermutation(size, derive_keys(5, 6, 1, KeyedPermutation.num_keys))
    values = np.array([0, 1, size // 2, size - 1])
    mapped = permutation.permute(values)
    assert ((mapped >= 0) & (mapped < size)).all()
    assert np.array_equal(permutation.invert(mapped), values)


def test_a_place_is_reached_from_everywhere_alike():
    """Chi-square over where element 0 of 16 goes under 4,000 keys: 15 degrees of freedom, 0.1 % point 37.7."""
    keys = (derive_keys(seed, 3, 1, KeyedPermutation.num_keys) for seed in range(4000))
    goes = [int(KeyedPermutation(16, key).permute(np.array([0]))[0]) for key in keys]
    counts = np.bincount(goes, minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 37.7


def test_no_two_of_seed_epoch_and_purpose_share_keys():
    values = (0, 1, 2, 2**32 - 1, 2**32, 2**32 + 1, 2**63)
    keys = [
        tuple(derive_keys(seed, epoch, purpose, 2))
        for seed, epoch, purpose in itertools.product(values, values, (0, 1, 2))
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (2**64, 0), (0, -1)])
def test_seeds_and_epochs_out_of_range_are_refused(seed, epoch):
    with pytest.raises(ConfigError, match=r"expected 0 <="):
        derive_keys(seed, epoch, 0, 1)


def test_uniform_numbers_fill_the_interval_and_streams_differ():
    key = derive_keys(1, 2, 3, 1)[0]
    first, second = (uniform(key, np.arange(50_000), stream) for stream in (0, 1))
    for draw in (first, second):
        assert 0 <= draw.min() < draw.max() < 1
        assert np.abs(np.histogram(draw, 20, (0, 1))[0] - 2500).max() < 5 * np.sqrt(2500)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.02


def test_several_streams_at_once_are_those_of_one_after_another():
    key, counters = derive_keys(1, 2, 3, 1)[0], np.array([7, 0, 2**40])
    assert uniforms(key, counters, 4, 3).tolist() == [
        uniform(key, counters, stream).tolist() for stream in range(3, 7)
    ]
    assert uniforms(key, counters[:0], 2).shape == (2, 0)


def test_permutations_of_different_tweaks_differ():
    permutation = KeyedPermutation(50, derive_keys(1, 2, 3, KeyedPermutation.num_keys))
    values = np.arange(50)
    mapped = [tuple(permutation.permute(values, np.full(50, tweak)).tolist()) for tweak in range(20)]
    assert len(set(mapped)) == 20


def test_every_release_draws_the_same_numbers():
    """States and versions of earlier releases rest on these: another value here is a new format."""
    keys = derive_keys(1, 2, 3, KeyedPermutation.num_keys)
    assert keys[:2].tolist() == [16458012420995149048, 17170766693932515442]
    assert KeyedPermutation(10, keys).permute(np.arange(10)).tolist() == [4, 3, 9, 5, 2, 7, 0, 6, 1, 8]
    assert uniform(keys[0], np.arange(2), 5).tolist() == [0.48159862242683404, 0.21508873740579104]
