"""How content is reduced to the limits of a part."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datasvc.runs.content import Content, ContentLimits, merge
from datasvc.runs.facts import make_event
from datasvc.runs.part import Part, PartRange, encode_part
from datasvc.runs.step_table import StepTable

# Names that JSON writes with many bytes, and events of very different sizes.
NAMES = st.lists(st.sampled_from(["loss", "\U0001f600" * 128, *map(str, range(50))]), unique=True, max_size=50)
TABLES = st.lists(st.tuples(NAMES, st.integers(1, 300)), max_size=40)
EVENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000)), max_size=100)


def make_content(tables, events):
    return Content(
        [
            StepTable.from_rows(
                (*names, str(number)), [(step, 1.0, (0.5,) * (len(names) + 1)) for step in range(size)]
            )
            for number, (names, size) in enumerate(tables)
        ],
        [make_event(time_s, f"event{name}", {"text": "x" * size}) for time_s, (name, size) in enumerate(events)],
    )


@given(TABLES, EVENTS, st.integers(1, 500), st.integers(1, 60), st.integers(1000, 50_000))
def test_a_part_has_at_most_the_bytes_and_the_number_of_events_of_the_limits(
    tables, events, bins, number, size_bytes
):
    content = make_content(tables, events)
    thin = content.thin(ContentLimits(bins, number, size_bytes))
    one_bin_each = sum(table.bin_bytes for table in thin.tables)
    assert len(encode_part(Part(PartRange(1, 1, 1), {}, thin))) <= 2 * size_bytes + one_bin_each + 1000
    assert len(thin.events) <= number
    assert thin.num_left_out >= len(events) - len(thin.events)
    if tuple(thin.events) != tuple(content.events) and thin.events:
        assert thin.events[-1].time_s >= thin.events[0].time_s


@given(EVENTS)
def test_content_within_the_limits_is_not_changed(events):
    content = make_content([], events)
    assert content.thin(ContentLimits(1, 1000, 1 << 20)) == content


def test_large_events_do_not_displace_a_small_one_of_another_name():
    events = [make_event(time_s, "note", {"text": "x" * 900}) for time_s in range(100)]
    events.insert(10, make_event(10, "checkpoint", {}))
    thin = Content((), events).thin(ContentLimits(1, 1000, 10_000))
    names = [event.event for event in thin.events]
    assert names.count("checkpoint") == 1
    assert 5 <= names.count("note") <= 10
    assert thin.events[-1].time_s == 99
    assert thin.num_left_out == 101 - len(names)


def test_what_is_thinned_often_as_it_grows_is_as_even_as_what_is_thinned_once():
    content = Content()
    for start in range(0, 20_000, 50):
        steps = range(start, start + 50)
        table = StepTable.from_rows(("loss",), [(step, 1.0, (0.5,)) for step in steps])
        rare = StepTable.from_rows(("loss", "accuracy"), [(start, 1.0, (0.5, 0.5))] if start % 1000 == 0 else [])
        events = [make_event(step, "note", {"step": step}) for step in steps]
        added = Content([table, *([rare] if len(rare) else [])], events)
        content = merge([content, added]).thin(ContentLimits(200, 200, 1 << 20))
    dense, rare = content.tables
    assert len(rare) == 20
    notes = np.array([event.facts["step"] for event in content.events])
    for places in (dense.last, notes):
        assert 100 <= len(places) <= 200
        # Twice as far apart as the densest that fits, but for the newest ones.
        assert set(np.diff(places)[:-60].tolist()) <= {128, 256}
        assert places[-1] == 19_999
    assert content.num_left_out == 20_000 - len(notes)
