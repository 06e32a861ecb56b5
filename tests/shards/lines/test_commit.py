"""Common ancestors on random histories, against their definition."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from datasvc.repository import Entry, Resolved
from datasvc.repository.logs.branches import LinePosition
from datasvc.repository.logs.heads import parents_of
from datasvc.shards.lines.commit import ancestors_of, find_common_ancestors
from tests.examples import examples


class History:
    """Entries in memory as a repository: a list of the parents of each version."""

    def __init__(self, parents):
        self.entries = {
            number: Entry(
                number,
                {
                    "branch": "b/1",
                    "parent": f"pets@{known[0]}" if known else None,
                    "merged": [f"old-name@{parent}" for parent in known[1:]],
                },
            )
            for number, known in enumerate(parents, 1)
        }
        self.num_reads = 0

    def positions(self, _name):
        return self

    def entry(self, number):
        self.num_reads += 1
        return self.entries[number]

    def __call__(self, number):
        return LinePosition.of(self.entry(number))


@st.composite
def histories(draw):
    return [
        draw(st.lists(st.integers(1, number - 1), max_size=2, unique=True)) if number > 1 else []
        for number in range(1, draw(st.integers(2, 14)))
    ]


def closure(parents, number):
    seen = {number}
    for each in range(number, 0, -1):
        if each in seen:
            seen.update(parents[each - 1])
    return seen


@given(histories(), st.data())
@examples(300)
def test_the_newest_common_ancestors_are_those_that_no_other_common_ancestor_has(parents, data):
    ours, theirs = (data.draw(st.integers(1, len(parents))) for _ in range(2))
    common = closure(parents, ours) & closure(parents, theirs)
    newest = {each for each in common if not any(each in closure(parents, other) - {other} for other in common)}
    found = find_common_ancestors(
        History(parents), Resolved("datasets", "pets", ours), Resolved("datasets", "pets", theirs)
    )
    assert [each.version for each in found] == sorted(newest, reverse=True)


@given(histories(), st.data())
@examples(60)
def test_ancestors_come_newest_first_and_each_once(parents, data):
    number = data.draw(st.integers(1, len(parents)))
    found = list(ancestors_of(History(parents), Resolved("datasets", "pets", number)))
    assert found == sorted(closure(parents, number), reverse=True)


def test_only_entries_newer_than_the_common_ancestor_are_read():
    history = History([[], *([number] for number in range(1, 500)), [500], [500]])
    found = find_common_ancestors(history, Resolved("datasets", "pets", 501), Resolved("datasets", "pets", 502))
    assert [str(each) for each in found] == ["pets@500"]
    assert history.num_reads == 2


def test_an_ingest_on_the_main_line_continues_the_version_before_it_and_a_copy_only_what_it_names():
    history = History([[], [1], [], []])
    contents = [
        {},
        {"branch": "b/1", "parent": "pets@1", "lines": {"": 1}},
        {"lines": {"": 1, "b/1": 2}},
        {"origin": {}},
    ]
    history.entries = {number: Entry(number, content) for number, content in enumerate(contents, 1)}
    assert [parents_of(history, number) for number in (1, 2, 3, 4)] == [[], [1], [1], []]
    assert [*itertools.islice(ancestors_of(history, Resolved("datasets", "pets", 3)), 5)] == [3, 1]
