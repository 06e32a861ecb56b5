"""Which report of a step counts when the clocks of the machines are wrong."""

import math

from hypothesis import given
from hypothesis import strategies as st

from datasvc.runs.content import Content
from datasvc.runs.facts import make_event
from datasvc.runs.part import Part, PartRange
from datasvc.runs.reader import Since, combine
from datasvc.runs.step_table import StepTable


def part_of(attempt, number, time_s, *, steps=(), evaluation=None, names=("loss",)):
    rows = [(step, time_s, (value,) * len(names)) for step, value in steps]
    events = [] if evaluation is None else [make_event(time_s, "evaluation", evaluation)]
    return Part(PartRange(attempt, number, number), {}, Content([StepTable.from_rows(names, rows)], events))


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=5))
def test_the_evaluation_of_the_newest_attempt_counts_whatever_the_clocks_say(clocks):
    parts = [
        part_of(attempt, 1, time_s, evaluation={"step": 8, "accuracy": attempt})
        for attempt, time_s in enumerate(clocks, 1)
    ]
    _, evaluation, events = combine(parts, Since())
    assert evaluation["accuracy"].values.tolist() == [len(clocks)]
    assert [event.facts["accuracy"] for event in events] == [*range(1, len(clocks) + 1)]


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 3)), min_size=1, max_size=12))
def test_of_equal_steps_that_which_was_written_last_counts_whatever_the_clocks_say(reports):
    # A part for each report, with another set of names each time, as of a program that adds a number.
    parts = [
        part_of(1, number, time_s, steps=[(step, number)], names=("loss", f"other{number}"))
        for number, (time_s, step) in enumerate(reports, 1)
    ]
    series, _, _ = combine(parts, Since())
    last = {step: number for number, (_, step) in enumerate(reports, 1)}
    assert dict(zip(series["loss"].steps.tolist(), series["loss"].values.tolist(), strict=True)) == last


def test_of_the_tables_of_one_part_the_later_report_counts():
    tables = [
        StepTable.from_rows(("loss", "rate"), [(1, 10.0, (1.0, 0.1)), (2, 30.0, (4.0, 0.1))]),
        StepTable.from_rows(("loss",), [(1, 20.0, (2.0,)), (2, 20.0, (3.0,))]),
    ]
    series, _, _ = combine([Part(PartRange(1, 1, 1), {}, Content(tables, ()))], Since())
    assert series["loss"].values.tolist() == [2.0, 4.0]


def test_an_attempt_with_an_earlier_clock_replaces_the_steps_that_it_repeats():
    old = part_of(1, 1, 1e9, steps=[(step, 1.0) for step in range(1, 6)])
    new = part_of(2, 1, 5.0, steps=[(step, 2.0) for step in range(4, 7)])
    series, _, _ = combine([old, new], Since())
    assert series["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert series["loss"].values.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert all(map(math.isfinite, series["loss"].times))
