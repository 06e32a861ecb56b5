"""Masks as values: equal masks are equal, and nothing is lost on the way through a state."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.ledger.masked import Masked, MaskedRows, masks_of, with_masks

NUMBER = st.integers(0, 6)
RANGES = st.lists(st.tuples(NUMBER, NUMBER, NUMBER).map(lambda t: (t[0], min(t[1:]), max(t[1:]))), max_size=5)
ROWS = st.lists(
    st.builds(
        MaskedRows,
        st.tuples(NUMBER, NUMBER),
        st.sampled_from(["a", "b"]),
        NUMBER,
        st.lists(NUMBER, max_size=4).map(tuple),
    ),
    max_size=4,
)
MASKS = st.builds(lambda ranges, rows: Masked(tuple(ranges), tuple(rows)), RANGES, ROWS)


def positions_of(masked):
    return {(epoch, at) for epoch in range(7) for at in range(7) if masked.at(epoch, np.array([at]))[0]}


def rows_of(masked):
    return {(item.table, item.shard, row): item.since for item in masked.samples for row in item.rows}


@given(MASKS, MASKS)
def test_a_union_has_all_masks_and_each_since_its_earliest_time(first, second):
    union = first | second
    assert positions_of(union) == positions_of(first) | positions_of(second)
    expected = rows_of(first)
    for place, since in rows_of(second).items():
        expected[place] = min(since, expected.get(place, since))
    assert rows_of(union) == expected
    assert union == second | first == union | first


@given(MASKS)
def test_masks_survive_a_state_of_json(masked):
    state = with_masks({"epoch": 3, "masked": {"positions": [[0, 0, 1]]}}, masked)
    assert masks_of(json.loads(json.dumps(state))) == masked
    assert ("masked" in state) == bool(masked)


@given(MASKS, st.tuples(NUMBER, NUMBER))
def test_masks_that_begin_later_leave_earlier_positions_counted(masked, cursor):
    later = masked.since(cursor)
    assert positions_of(later) == {place for place in positions_of(masked) if place >= cursor}
    assert rows_of(later) == {place: max(since, cursor) for place, since in rows_of(masked).items()}


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": [[0, 5, 2]]},
        {"positions": [[0, -1, 2]]},
        {"positions": [[0, 1]]},
        {"positions": [[0, True, 2]]},
        {"samples": [{"version": "a", "shard": 0}]},
        {"samples": [{"version": "a", "shard": 0, "rows": ["1"]}]},
        {"samples": [{"version": "a", "shard": 0, "rows": [1], "since": [1]}]},
        [],
    ],
)
def test_other_values_are_refused(fields):
    with pytest.raises(ConfigError):
        Masked.from_dict(fields)
