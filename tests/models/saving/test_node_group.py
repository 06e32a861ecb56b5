"""After the planned copies each object is on enough nodes, and none is sent where it is; nobody waits in a cycle."""

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from datasvc.models.saving.nodes.node_group import missing_objects, plan_copies, plan_fetches, plan_rounds
from tests.examples import examples

ON_NODES = st.lists(st.dictionaries(st.sampled_from("abcdef"), st.just(7)), min_size=1, max_size=5)


@examples(100)
@given(objects=ON_NODES, copies=st.integers(1, 6), everywhere=st.sets(st.sampled_from("abcdef")))
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


@examples(100)
@given(objects=ON_NODES, data=st.data())
def test_each_node_gets_what_it_wants_and_lacks_and_nothing_else(objects, data):
    wanted = [data.draw(st.sets(st.sampled_from("abcdef"))) for _ in objects]
    planned = plan_fetches(objects, wanted)
    known = set().union(*objects)
    for node, needs in enumerate(wanted):
        got = [copy.digest for copy in planned if copy.target == node]
        assert sorted(got) == sorted((needs & known) - objects[node].keys())
    assert all(copy.digest in objects[copy.source] for copy in planned)


def test_nodes_that_have_the_same_send_about_as_much():
    have = dict.fromkeys("abcdef", 7)
    planned = plan_fetches([have, have, {}], [[], [], list("abcdef")])
    assert Counter(copy.source for copy in planned) == {0: 3, 1: 3}


@examples(100)
@given(objects=ON_NODES, copies=st.integers(1, 6))
def test_the_rounds_carry_each_copy_once_and_end_although_each_node_waits_for_both_directions(objects, copies):
    planned = plan_copies(objects, copies=copies)
    num_nodes = len(objects)
    waiting = [deque(plan_rounds(planned, node, num_nodes)) for node in range(num_nodes)]
    assert Counter(sent for rounds in waiting for sent, _ in rounds if sent) == Counter(planned)
    assert Counter(received for rounds in waiting for _, received in rounds if received) == Counter(planned)
    # A node ends its exchange when its message has been posted and the other one has come.
    posted, taken = Counter(), Counter()
    has_posted = [False] * num_nodes
    is_moving = True
    while is_moving:
        is_moving = False
        for node, rounds in enumerate(waiting):
            if rounds and not has_posted[node]:
                has_posted[node] = is_moving = True
                posted.update([rounds[0][0]] if rounds[0][0] else [])
            if rounds and (rounds[0][1] is None or posted[rounds[0][1]] > taken[rounds[0][1]]):
                taken.update([rounds[0][1]] if rounds[0][1] else [])
                rounds.popleft()
                has_posted[node], is_moving = False, True
    assert not any(waiting)


def test_the_second_copy_is_on_the_next_node():
    planned = plan_copies([{"a": 1}, {"b": 2}, {"c": 3}], copies=2)
    assert [tuple(copy) for copy in planned] == [("a", 1, 0, 1), ("b", 2, 1, 2), ("c", 3, 2, 0)]
    assert plan_rounds(planned, 1, 3) == [(planned[1], planned[0])]


def test_an_object_of_another_size_is_missing():
    assert missing_objects({"a": 1, "b": 2, "c": None, "d": 4}, [{"a": 1, "b": 1}, {"c": 9}]) == ["b", "d"]
