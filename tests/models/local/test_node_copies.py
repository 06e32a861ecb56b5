"""After the planned copies each object is on enough nodes, and none is sent where it is."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from datasvc.models.local.node_copies import missing_objects, plan_copies
from tests.examples import examples


@examples(100)
@given(
    objects=st.lists(st.dictionaries(st.sampled_from("abcdef"), st.just(7)), min_size=1, max_size=5),
    copies=st.integers(1, 6),
    everywhere=st.sets(st.sampled_from("abcdef")),
)
def test_each_object_is_then_on_as_many_nodes_as_wanted_and_is_sent_by_one_that_has_it(objects, copies, everywhere):
    planned = plan_copies(objects, copies=copies, everywhere=everywhere)
    holders = Counter(digest for on_node in objects for digest in on_node)
    after = holders + Counter(copy.digest for copy in planned)
    for digest, number in after.items():
        wanted = len(objects) if digest in everywhere else min(copies, len(objects))
        assert number == max(wanted, holders[digest])
    assert all(copy.digest in objects[copy.source] for copy in planned)
    assert all(copy.digest not in objects[copy.target] for copy in planned)
    assert len(set(planned)) == len(planned)


def test_the_second_copy_is_on_the_next_node():
    planned = plan_copies([{"a": 1}, {"b": 2}, {"c": 3}], copies=2)
    assert [tuple(copy) for copy in planned] == [("a", 1, 0, 1), ("b", 2, 1, 2), ("c", 3, 2, 0)]


def test_an_object_of_another_size_is_missing():
    assert missing_objects({"a": 1, "b": 2, "c": None, "d": 4}, [{"a": 1, "b": 1}, {"c": 9}]) == ["b", "d"]
