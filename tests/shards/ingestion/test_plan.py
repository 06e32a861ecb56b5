import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.shards.ingestion.plan import (
    PARTS_AT_ONCE,
    group_parts,
    hold_out,
    is_held_out,
    permute_in_shard,
    plan_shards,
)
from datasvc.shards.sources import ListedFile, SourcePart

sizes = st.lists(st.integers(0, 100), min_size=1, max_size=60)
seeds = st.integers(0, 2**64 - 1)


def listed(sizes):
    return [ListedFile(str(number), "", size, None) for number, size in enumerate(sizes)]


def parts(sizes):
    return [SourcePart("train", str(number), size) for number, size in enumerate(sizes)]


@given(sizes, st.integers(1, 300), seeds, st.booleans())
def test_every_file_has_one_place_and_no_shard_exceeds_its_size_by_more_than_a_file(given, size, seed, keep_order):
    plans = plan_shards(listed(given), size, seed, keep_order=keep_order)
    assert sorted(int(file.key) for plan in plans for file in plan) == list(range(len(given)))
    assert all(sum(file.size_bytes for file in plan[:-1]) < size for plan in plans)
    assert all(sum(file.size_bytes for file in plan) >= size for plan in plans[:-1])


@given(sizes, st.integers(1, 300), seeds, st.booleans(), st.booleans())
def test_every_part_is_in_one_unit_and_only_the_last_unit_is_small(given, size, seed, keep_order, together):
    groups = group_parts(parts(given), size, seed, keep_order=keep_order, together=together)
    assert sorted(int(part.name) for group in groups for part in group) == list(range(len(given)))
    if together:
        assert len(groups) == 1
    least = 1 if together else min(PARTS_AT_ONCE, math.ceil(len(given) / 8))
    for group in groups[:-1]:
        assert len(group) >= least
        assert sum(part.size_bytes for part in group) >= size
        # Without its last part it was still too small or too few.
        rest = group[:-1]
        assert len(rest) < least or sum(part.size_bytes for part in rest) < size


def test_keep_order_keeps_the_order_of_files_and_parts():
    plans = plan_shards(listed([1] * 10), 3, seed=5, keep_order=True)
    assert [int(file.key) for plan in plans for file in plan] == list(range(10))
    groups = group_parts(parts([1] * 10), 3, seed=5, keep_order=True, together=False)
    assert [int(part.name) for group in groups for part in group] == list(range(10))


def test_parts_are_dealt_by_the_seed():
    orders = {
        tuple(
            part.name
            for group in group_parts(parts([1] * 50), 5, seed, keep_order=False, together=False)
            for part in group
        )
        for seed in range(4)
    }
    assert len(orders) == 4


def test_shards_of_one_unit_are_permuted_differently():
    orders = {tuple(permute_in_shard(20, 1, unit, ordinal)) for unit in range(2) for ordinal in range(3)}
    assert len(orders) == 6
    assert all(sorted(order) == list(range(20)) for order in orders)


@given(st.lists(st.text(max_size=8), unique=True, max_size=40), st.floats(0.01, 0.99))
def test_held_out_samples_are_chosen_by_their_key_alone(keys, fraction):
    files = [ListedFile(key, "", 1, None) for key in keys]
    half = hold_out({"train": files[: len(files) // 2]}, fraction)
    whole = hold_out({"train": files}, fraction)
    for split in half:
        assert {file.key for file in half[split]} <= {file.key for file in whole[split]}
    assert sum(map(len, whole.values())) == len(files)


def test_the_held_out_share_is_about_the_fraction():
    share = sum(is_held_out(f"sample {number}", 0.1) for number in range(20_000)) / 20_000
    assert 0.09 < share < 0.11


@pytest.mark.parametrize("splits", [{"train": [], "val": []}, {"test": []}])
def test_nothing_is_held_out_of_a_source_that_has_a_val_or_no_train(splits):
    with pytest.raises(ConfigError, match="leave out --val-fraction"):
        hold_out(splits, 0.1)
