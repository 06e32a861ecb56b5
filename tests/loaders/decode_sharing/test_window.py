"""Who gets what from a decode group, and when: without processes, sockets or clocks."""

from hypothesis import given
from hypothesis import strategies as st

from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.step_index import StepIndex
from datasvc.loaders.decode_sharing.window import AHEAD, Window


def decode_all(window):
    """Decode for as long as somebody needs more; returns who got which step."""
    served = []
    while (step := window.next_step()) is not None:
        served += [(consumer, step) for consumer in window.mark_decoded()]
    return served


def walk(window, consumer, steps):
    """Ask for steps one by one; returns the statuses."""
    statuses = []
    for step in steps:
        statuses.append(window.request(consumer, step).status)
        decode_all(window)
    return statuses


def test_the_first_to_ask_moves_the_window_and_the_rest_finds_what_it_decoded():
    window = Window(4, 0)
    assert window.next_step() is None
    assert window.request("a", None).status == "restarted"
    assert window.next_step() == 0
    assert window.request("b", 0).status == "pending"
    assert window.mark_decoded() == ["a", "b"]
    assert decode_all(window) == []
    assert [step for step in range(10) if step in window] == list(range(1 + AHEAD))
    assert walk(window, "a", [1, 2, 3]) == ["ready"] * 3
    assert window.request("b", 3).status == "ready"


def test_who_falls_out_of_the_window_is_told_how_far_and_the_fastest_goes_on():
    window = Window(4, 0)
    walk(window, "slow", [0])
    walk(window, "fast", range(20))
    answer = window.request("slow", 1)
    assert (answer.status, answer.behind) == ("refused", 18)
    assert window.followers == {"fast"}
    assert walk(window, "fast", range(20, 40)) == ["ready"] * 20
    assert walk(window, "slow", [39]) == ["ready"]


def test_the_others_wait_for_who_is_behind_as_far_as_patience_goes():
    window = Window(4, 10)
    walk(window, "fast", range(9))
    assert window.request("late", 0).status == "pending"
    assert window.request("fast", 9).status == "pending"
    served = decode_all(window)
    assert served == [("late", 0), ("fast", 9)]
    assert window.request("later", 0).status == "refused"  # 2 are left


def test_patience_comes_back_with_what_is_decoded():
    window = Window(4, 5)
    walk(window, "fast", range(20))
    assert walk(window, "late", [14]) == ["pending"]
    assert walk(window, "later", [14]) == ["refused"]
    walk(window, "fast", range(20, 20 + 5 * 8))
    assert walk(window, "later", [54]) == ["pending"]


def test_a_follower_that_stopped_asking_does_not_keep_others_away_for_ever():
    window = Window(4, 0)
    walk(window, "paused", range(20))
    statuses = [window.request("alive", 0).status for _ in range(6)]
    assert statuses == ["refused"] * 4 + ["restarted", "pending"]


def test_who_waits_is_not_passed_over():
    window = Window(4, 0)
    walk(window, "patient", range(20))
    window.request("patient", 30 - 4)
    assert [window.request("alive", 0).status for _ in range(10)] == ["refused"] * 10


def test_when_the_last_follower_leaves_the_next_to_ask_decides():
    window = Window(4, 0)
    walk(window, "a", range(20))
    window.remove("a")
    assert window.next_step() is None
    assert window.request("b", 3).status == "restarted"
    assert decode_all(window) == [("b", 0)]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("go on"), st.integers(0, 3)),
        st.tuples(st.just("jump"), st.integers(0, 3), st.integers(0, 60)),
        st.tuples(st.just("decode"), st.integers(1, 4)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(actions, st.integers(AHEAD + 2, 8), st.integers(0, 20))
def test_every_pending_step_comes_or_is_cancelled_and_nothing_is_ready_that_was_not_just_decoded(
    actions, num_slots, patience
):
    window = Window(num_slots, patience)
    first = 0  # steps are counted from where the window moved to last
    at = dict.fromkeys(range(4), 0)
    pending, decoded = set(), []

    def decode():
        step = window.next_step()
        if step is None:
            return False
        if decoded and step != decoded[-1] + 1:
            decoded.clear()  # it went back
        decoded.append(step)
        for consumer in window.mark_decoded():
            pending.remove((consumer, step))
        return True

    for action, *arguments in actions:
        consumer = arguments[0]
        if action == "decode":
            for _ in range(consumer):
                decode()
        elif action in {"remove", "cancel"}:
            getattr(window, action)(consumer)
            pending -= {each for each in pending if each[0] == consumer}
        else:
            if action == "jump":
                window.cancel(consumer)
                pending -= {each for each in pending if each[0] == consumer}
                at[consumer] = arguments[1]
            step = at[consumer] - first
            answer = window.request(consumer, step)
            at[consumer] += 1
            if answer.status == "restarted":
                first, step = first + step, 0
                pending.clear()
                decoded.clear()
            if answer.status == "refused":
                pending -= {each for each in pending if each[0] == consumer}
                assert consumer not in window.followers
            elif answer.status == "ready":
                assert step in decoded[-num_slots:]
            else:
                pending.add((consumer, step))
    while decode():
        pass
    assert not pending


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(AHEAD + 2, 8))
def test_the_fastest_is_never_refused_nor_held_up_where_nobody_is_waited_for(turns, num_slots):
    window, at = Window(num_slots, 0), dict.fromkeys(range(4), 0)
    for consumer in turns:
        is_fastest = at[consumer] == max(at.values())
        answer = window.request(consumer, at[consumer])
        if is_fastest:
            assert answer.status != "refused"
        decode_all(window)
        if answer.status != "refused":
            assert at[consumer] in window
        at[consumer] += 1
        if answer.status == "restarted" and at[consumer] > 1:
            return  # everybody else was idle: steps are counted anew


PATHS = st.builds(StepIndex, st.integers(10, 40), st.integers(1, 10), st.sampled_from(["drop", "short", "pad"]))


@given(PATHS, st.integers(0, 9), st.integers(0, 30))
def test_steps_between_two_places_are_those_that_a_run_takes(path, start, count):
    first = cursor = Cursor(2, start if path.num_samples - start >= path.global_batch else 0)
    for step in range(count):
        assert path.steps_between(first, cursor) == step
        assert path.steps_between(cursor, first) == -step
        cursor = path.after(cursor)


def test_a_place_that_a_run_never_comes_to_has_no_distance():
    path = StepIndex(100, 10, "drop")
    assert path.steps_between(Cursor(0, 3), Cursor(0, 20)) is None
    assert path.steps_between(Cursor(0, 3), Cursor(1, 3)) is None
    assert path.steps_between(Cursor(0, 3), Cursor(1, 0)) == 9
