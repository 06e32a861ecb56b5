"""The drawing of a history can be read back: whoever looks at it sees every parent, and no other."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datasvc.models.registry.graph import draw_history, draw_newest, order_history, read_history
from datasvc.models.registry.registry import ModelVersion, model_ancestry
from datasvc.models.registry.retention import remove
from datasvc.repository.logs.log import Log
from tests.models.entries import commit_entry


@st.composite
def histories(draw):
    """Versions of two models; each has up to three parents among those before it."""
    places = []
    versions = []
    for _ in range(draw(st.integers(1, 14))):
        name = draw(st.sampled_from(["m", "n"]))
        place = (name, 1 + sum(each[0] == name for each in places))
        parents = (
            [f"{a}@{b}" for a, b in draw(st.lists(st.sampled_from(places), max_size=3, unique=True))]
            if places
            else []
        )
        versions.append(version(*place, *parents))
        places.append(place)
    return versions


def version(name, number, *parents, removed=False):
    entry = {"parent": parents[0] if parents else None, "merged": list(parents[1:])}
    return ModelVersion(name, number, (), entry, removed)


def read_drawing(lines):
    """Return the parents of each version as the drawing shows them, by following its lines downwards."""
    parents = {}
    lanes = {}  # by column: versions whose line comes down there
    last = None
    for line in lines:
        row = line.graph
        below = {}
        if line.version is not None:
            last = str(line.version)
            parents[last] = set()
            (own,) = (place for place, mark in enumerate(row) if mark in "*o")
            for child in lanes.get(own, ()):
                parents[child].add(last)
            for place, mark in enumerate(row):
                if place == own and mark == "*":
                    below[place] = {last}
                elif mark == "|":
                    below[place] = set(lanes[place])
        else:
            across = [place for place, mark in enumerate(row) if mark in "-<>+"]
            ends = {min(across) - 1, max(across) + 1}
            for place, mark in enumerate(row):
                if mark in "|+" and place % 2 == 0:
                    below[place] = set(lanes.get(place, ()))
            (ending,) = [place for place in ends if row[place] == "'"] or [None]
            (opening,) = [place for place in ends if row[place] == "."] or [None]
            if ending is not None:
                (other,) = ends - {ending}
                below[other] |= lanes[ending]
            elif opening is not None:
                below[opening] = {last}
            else:
                arrow = next(place for place in across if row[place] in "<>")
                below[max(ends) if row[arrow] == ">" else min(ends)] |= {last}
        lanes = below
    assert not lanes, "a line leads nowhere"
    return parents


@given(histories())
def test_a_drawing_shows_every_parent_and_no_other(versions):
    lines = draw_history(versions, "m")
    assert read_drawing(lines) == {str(each): set(each.parents) for each in versions}
    assert all(line.graph == line.graph.rstrip() for line in lines)


@given(histories())
@example([version("m", 1)])
def test_children_come_before_parents_and_the_newest_first_where_both_may(versions):
    shown = [str(line.version) for line in draw_history(versions, "m") if line.version is not None]
    assert sorted(shown) == sorted(map(str, versions))
    for each in versions:
        assert all(shown.index(str(each)) < shown.index(parent) for parent in each.parents)
    numbers = [each.version for each in versions if each.name == "m" and not each.parents]
    lone = [int(text[2:]) for text in shown if text.startswith("m@") and int(text[2:]) in numbers]
    children = {parent for each in versions for parent in each.parents}
    free = [number for number in lone if f"m@{number}" not in children]
    assert free == sorted(free, reverse=True)


def drawn(versions, name="m"):
    return "\n".join(f"{line.graph} {line.version or ''}".rstrip() for line in draw_history(versions, name))


def test_a_fork_a_merge_and_a_model_that_it_was_made_from_are_drawn():
    versions = [
        version("base", 2),
        version("m", 1, "base@2"),
        version("m", 2, "m@1"),
        version("m", 3, "m@1"),
        version("m", 4, "m@2", "m@3"),
        version("m", 5, "m@4"),
    ]
    assert drawn(versions) == "* m@5\n* m@4\n|-.\n| * m@3\n* | m@2\n|-'\n* m@1\no base@2"


def test_parents_that_are_not_here_or_are_no_versions_are_not_drawn():
    versions = [version("m", 1, "gone@3"), version("m", 2, "m@prod"), version("m", 3, "no reference!", "m@2")]
    assert drawn(versions) == "* m@3\no m@2\no m@1"


def test_entries_that_name_each_other_as_parents_are_drawn_all_the_same():
    versions = [version("m", 1, "m@2"), version("m", 2, "m@1"), version("m", 3, "m@3")]
    assert read_drawing(draw_history(versions, "m")) == {"m@3": set(), "m@2": {"m@1"}, "m@1": set()}
    assert order_history({("m", 1): [("m", 1)]}, "m") == [("m", 1)]


def test_ancestors_in_other_models_are_part_of_a_history_however_far_back(repository):
    commit_entry(repository, "base")
    commit_entry(repository, "base", parent="base@1")
    commit_entry(repository, "base")
    commit_entry(repository, "tuned", parent="base@2")
    commit_entry(repository, "m", parent="tuned@1", merged=["base@9", "elsewhere@1"])
    remove(repository, ["tuned@1"])
    found = {str(each): each for each in model_ancestry(repository, "m")}
    assert sorted(found) == ["base@1", "base@2", "m@1", "tuned@1"]
    assert (found["tuned@1"].removed, found["m@1"].removed) == (True, False)


def head_of(lines, last):
    """Return the lines of a drawing before that of version number `last` + 1."""
    places = [number for number, line in enumerate(lines) if line.version is not None] + [len(lines)]
    return lines[: places[min(last, len(places) - 1)]]


def with_others(own, versions):
    """Return versions of a model with what they were made from in others, however far back."""
    found = {str(each): each for each in own}
    for each in reversed(versions):  # children before parents
        if each.name != "m" and any(str(each) in child.parents for child in found.values()):
            found[str(each)] = each
    return list(found.values())


# m@1, which is not read, was made of n@1 and that of a@1: so a@1 does not stand below m@2 at once.
HIDDEN = [
    version("a", 1),
    version("n", 1, "a@1"),
    version("m", 1, "n@1"),
    version("n", 2, "m@1"),
    version("m", 2, "n@2", "a@1"),
]


@given(histories(), st.integers(1, 14), st.integers(1, 14))
@example(HIDDEN, 2, 1)
@example([version("m", 1, "m@3"), version("m", 2), version("m", 3, "m@4"), version("m", 4)], 2, 2)
def test_the_newest_versions_alone_give_the_beginning_of_the_whole_drawing_or_none(versions, last, num_read):
    own = [each for each in versions if each.name == "m"]
    older = [each.version for each in own[:-num_read]]
    whole = draw_history(with_others(own, versions), "m")
    found = draw_newest(with_others(own[-num_read:], versions), "m", last=last, older=older)
    assert found is None or found == head_of(whole, last)
    assert found is not None or older


@pytest.fixture
def num_read(monkeypatch):
    """How many entries of versions were read, by model."""
    counted = {}
    read = Log.read

    def count(log, number):
        counted[log.path] = counted.get(log.path, 0) + 1
        return read(log, number)

    monkeypatch.setattr(Log, "read", count)
    return counted


def test_the_newest_of_a_long_history_are_drawn_without_reading_the_others(repository, num_read):
    commit_entry(repository, "base")
    commit_entry(repository, "m", parent="base@1")
    for number in range(2, 80):
        commit_entry(repository, "m", parent=f"m@{number - 1}")
    commit_entry(repository, "m", parent="m@70")  # a fork
    lines = read_history(repository, "m", last=3)
    assert [f"{line.graph} {line.version or ''}".rstrip() for line in lines] == [
        "* m@80", "| * m@79", "| * m@78",
    ]  # fmt: skip
    assert num_read == {"models/m/versions": 3}


def test_more_is_read_where_what_a_version_was_made_from_comes_before_older_versions(repository, num_read):
    for number in range(40):
        commit_entry(repository, "m", parent=f"m@{number}" if number else None)
    commit_entry(repository, "mean", parent="m@39", merged=["m@40"])
    commit_entry(repository, "m", parent="mean@1")
    for last in (1, 2, 3, 41, 42, 60):
        assert read_history(repository, "m", last=last) == head_of(read_history(repository, "m"), last)
    num_read.clear()
    assert len(read_history(repository, "m", last=1)) == 1
    assert num_read == {"models/m/versions": 1, "models/mean/versions": 1}
