"""The packer: every token once, no pack above the block, and little padding, whatever the lengths are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.shards.packing.best_fit import pack_documents


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 25), st.integers(1, 12))
def test_every_token_is_in_one_pack_and_no_pack_is_above_the_block(lengths, block, group):
    lengths = np.array(lengths, np.int64)
    packed = pack_documents(lengths, block, group=group)
    tokens = [
        (row, token)
        for row, start, size in zip(*(each.tolist() for each in packed[:3]), strict=True)
        for token in range(start, start + size)
    ]
    assert sorted(tokens) == [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    packs = np.repeat(np.arange(len(packed.counts)), packed.counts)
    sums = np.bincount(packs, packed.sizes, minlength=len(packed.counts))
    assert (sums <= block).all()
    assert packed.counts.all()
    # Documents of one pack are of one group, the last of which may have half more.
    groups = np.minimum(packed.rows // group, max(1, (len(lengths) + group // 2) // group) - 1)
    assert all(len(set(groups[packs == pack])) == 1 for pack in range(len(packed.counts)))
    again = pack_documents(lengths, block, group=group)
    assert all((first == second).all() for first, second in zip(packed, again, strict=True))


def lognormal(rng, count):
    return np.clip(rng.lognormal(6, 1, count), 1, 2048)


def bimodal(rng, count):
    return np.where(rng.random(count) < 0.8, rng.normal(250, 60, count), rng.normal(1500, 150, count)).clip(1, 2048)


@pytest.mark.parametrize("draw", [lognormal, bimodal])
def test_padding_is_within_a_percent_of_the_least_that_any_packing_has(draw):
    lengths = draw(np.random.default_rng(0), 20_000).astype(np.int64)
    num_packs = len(pack_documents(lengths, 2048).counts)
    # No packing has fewer packs than full blocks of all tokens.
    assert 1 - lengths.sum() / (num_packs * 2048) < 0.01


def test_a_document_takes_the_fullest_pack_that_has_room():
    packed = pack_documents(np.array([5, 7, 3]), 10)
    assert [rows.tolist() for rows in np.split(packed.rows, np.cumsum(packed.counts)[:-1])] == [[1, 2], [0]]
