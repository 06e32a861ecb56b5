"""Codecs of gradients: values are as near as the bits allow, and the mean of random roundings is the value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.gradients.codecs import BLOCK, INT4, INT8, ONE_BIT, TERNARY, VOTES, qsgd

CODECS = {
    "int8": INT8,
    "int4": INT4,
    "ternary": TERNARY,
    "onebit": ONE_BIT,
    "signsgd": VOTES,
    "qsgd:1": qsgd(1),
    "qsgd:7": qsgd(7),
    "qsgd:127": qsgd(127),
}
by_name = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def blocks(seed=0, count=5):
    return torch.randn(count, BLOCK, generator=torch.Generator().manual_seed(seed))


def sent(codec, values, seed=0):
    random = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed))
    packed = codec.pack(values, random)
    assert packed.dtype is torch.uint8
    assert packed.shape == (len(values), codec.block_bytes)
    return codec.unpack(packed)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int8", 8),
        ("int4", 4),
        ("ternary", 2),
        ("onebit", 1),
        ("signsgd", 2),
        ("qsgd:1", 2),
        ("qsgd:7", 4),
        ("qsgd:127", 8),
    ],
)
def test_a_number_has_the_bits_of_its_codec(name, bits):
    codec = CODECS[name]
    assert codec.block_bytes == BLOCK * bits // 8 + 4 * codec.num_scales


@given(st.integers(0, 2**31), st.floats(1e-20, 1e20))
def test_the_nearest_integer_is_half_a_step_away_at_most(seed, factor):
    values = blocks(seed) * factor
    largest = values.abs().amax(1, keepdim=True)
    for codec, steps in ((INT8, 127), (INT4, 7)):
        assert ((sent(codec, values) - values).abs() <= largest / steps * 0.5001).all()


@pytest.mark.parametrize("name", ["ternary", "qsgd:1", "qsgd:7", "qsgd:127"])
def test_the_mean_of_random_roundings_is_the_value(name):
    codec, values, count = CODECS[name], blocks(count=2), 1000
    decoded = torch.stack([sent(codec, values, seed) for seed in range(count)])
    # The square of the error of a mean is the variance divided by the count, on average over the 1,024 numbers.
    squares = (decoded.mean(0) - values).square().sum() / (decoded.var(0).sum() / count)
    assert 0.7 < squares < 1.3


def test_one_bit_keeps_the_mean_of_each_side():
    values = blocks()
    for row, decoded in zip(values, sent(ONE_BIT, values), strict=True):
        expected = torch.where(row >= 0, row[row >= 0].mean(), row[row < 0].mean())
        torch.testing.assert_close(decoded, expected)


def test_a_vote_is_the_sign():
    values = blocks()
    values[0, :9] = 0
    assert torch.equal(sent(VOTES, values), torch.sign(values))


@by_name
def test_zeros_are_zeros_and_what_is_no_number_stays_none(codec):
    values = blocks()
    values[1] = 0
    values[2, 17] = float("nan")
    decoded = sent(codec, values)
    assert not decoded[1].any()
    assert decoded[2].isnan().any()
    assert decoded[[0, 1, 3, 4]].isfinite().all(), "the other blocks are as they were"


@by_name
def test_an_infinite_number_is_seen(codec):
    values = blocks()
    values[2, 17] = float("inf")
    assert not sent(codec, values)[2].isfinite().all()
