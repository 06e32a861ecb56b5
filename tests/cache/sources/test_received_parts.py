"""The note of which parts have arrived: believed only where it is exactly what was written."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.sources.range_requests import PART_BYTES, ReceivedParts

SIZE = 9 * PART_BYTES + 1


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.parts"


def test_what_was_noted_is_there_after_a_restart(path):
    with ReceivedParts(path, SIZE) as parts:
        assert (parts.num_parts, parts.arrived) == (10, frozenset())
        for number in (3, 0, 9):
            parts.add(number)
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == {0, 3, 9}
        parts.clear()
        parts.add(1)
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == {1}


def test_the_note_of_an_object_of_another_size_is_dropped(path):
    with ReceivedParts(path, SIZE) as parts:
        parts.add(0)
    with ReceivedParts(path, SIZE + 1) as parts:
        assert parts.arrived == frozenset()
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == frozenset()


@given(st.data())
def test_a_damaged_note_is_dropped_whole(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("parts") / "x.parts"
    with ReceivedParts(path, SIZE) as parts:
        for number in range(4):
            parts.add(number)
    content = bytearray(path.read_bytes())
    damage = data.draw(st.sampled_from(["flip", "cut", "zeros"]))
    if damage == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        del content[-data.draw(st.integers(1, 7)) :]
    else:
        content += bytes(data.draw(st.integers(1, 40)))
    path.write_bytes(content)
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == frozenset()
        parts.add(5)
    with ReceivedParts(path, SIZE) as parts:
        assert parts.arrived == {5}


def test_an_object_without_bytes_has_no_parts(path):
    with ReceivedParts(path, 0) as parts:
        assert parts.num_parts == 0


def test_closing_leaves_no_descriptor_open(path):
    before = len(os.listdir("/proc/self/fd"))
    ReceivedParts(path, SIZE).close()
    assert len(os.listdir("/proc/self/fd")) == before
