"""The search for the heads of lines, against a search through all entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import CorruptDataError
from datasvc.repository.logs.branches import MAIN, LinePosition, branch_of, find_head, find_lines, line_fields
from datasvc.repository.logs.log import Entry
from tests.examples import examples

BRANCHES = [f"b{number}/1" for number in range(3)]
# A line, and whether the entry is written by a release that knows no branches, which is then on the main line.
commits = st.lists(st.tuples(st.sampled_from([MAIN, *BRANCHES]), st.booleans()), min_size=1, max_size=40)


class Entries:
    """A log in memory, whose reads are counted."""

    def __init__(self):
        self.entries, self.num_reads = [], 0

    def __call__(self, number):
        self.num_reads += 1
        return LinePosition.of(self.entries[number - 1])

    def commit(self, line, *, old_release=False):
        newest = len(self.entries)
        if old_release:
            fields = {}
        elif line == MAIN:
            fields = line_fields(MAIN, self(newest).after() if newest else {})
        else:
            fields = line_fields(line, (newest and self(newest).after()) or find_lines(self, newest))
        self.entries.append(Entry(newest + 1, fields))

    def line_of(self, number):
        return self.entries[number - 1].content.get("branch", MAIN)


@given(commits, st.sets(st.integers(1, 40)), st.data())
@examples(200)
def test_the_head_of_each_line_is_its_newest_version_that_is_not_removed(lines, removed, data):
    log = Entries()
    for line, old_release in lines:
        log.commit(MAIN if old_release else line, old_release=old_release)
    newest = data.draw(st.integers(0, len(lines)))
    for line in (MAIN, *BRANCHES):
        expected = [
            number for number in range(1, newest + 1) if log.line_of(number) == line and number not in removed
        ]
        assert find_head(log, line, newest, removed) == (expected[-1] if expected else None)


@given(st.lists(st.integers(0, 199), max_size=100))
@examples(30)
def test_more_branches_than_an_entry_lists_are_found_all_the_same(drawn):
    order = [*range(150), *drawn]
    log = Entries()
    log.commit(MAIN)
    for number in order:
        log.commit(f"b{number}/1")
    for number in range(200):
        last = max((place for place, each in enumerate(order) if each == number), default=None)
        assert find_head(log, f"b{number}/1", len(log.entries)) == (None if last is None else last + 2)
    assert find_head(log, MAIN, len(log.entries)) == 1
    assert all(len(entry.content.get("lines", {})) <= 65 for entry in log.entries)


def test_a_head_is_found_by_two_reads_behind_any_number_of_versions_of_another_line():
    log = Entries()
    log.commit(MAIN)
    log.commit("old/1")
    for _ in range(300):
        log.commit("busy/1")
    for line, expected in ((MAIN, 1), ("old/1", 2), ("busy/1", 302)):
        log.num_reads = 0
        assert find_head(log, line, 302) == expected
        assert log.num_reads <= 2
    log.num_reads = 0
    assert find_head(log, "none/1", 302) is None
    assert log.num_reads == 1


@pytest.mark.parametrize(
    "content",
    [
        {"branch": 7},
        {"branch": "a"},
        {"branch": "../1"},
        {"branch": "a/b/1"},
        {"branch": "a/-1"},
        {"branch": "a/1", "lines": {"": 5}},
        {"branch": "a/1", "lines": {"": 0}},
        {"branch": "a/1", "lines": {"": True}},
        {"branch": "a/1", "lines": ["a"]},
        {"lines": {"": "4"}},
    ],
)
def test_fields_that_are_not_valid_are_corrupt_data_and_no_endless_search(content):
    with pytest.raises(CorruptDataError, match=r"not (a )?valid"):
        LinePosition.of(Entry(5, content))


def test_the_branch_of_an_entry_is_named_without_the_move_that_began_it():
    assert branch_of({"branch": "a.b-c/12"}) == "a.b-c"
    assert branch_of({}) is None
