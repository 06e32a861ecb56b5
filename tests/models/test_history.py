"""The drawing of a history can be read back: whoever looks at it sees every parent, and no other."""

from hypothesis import example, given
from hypothesis import strategies as st

from datasvc.models.history import draw_history, order_history
from datasvc.models.registry import ModelVersion, model_ancestry
from datasvc.models.removal import remove
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
