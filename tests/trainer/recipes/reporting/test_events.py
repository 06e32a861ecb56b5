"""What a run says, on a real terminal and on a pipe."""

import json
import os

from datasvc.trainer.recipes.reporting.events import JsonEvents, ProgressLine, TerminalEvents, choose_events
from tests.support.terminals import read_terminal

FACTS = {"step": 7, "epoch": 1, "progress": 0.25, "loss": 0.5, "rate": 0.1, "step_s": 0.2, "wait_s": 0.05}
STEP = {**FACTS, "samples": 400, "unit": "images"}


def test_a_pipe_gets_whole_json_lines():
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        events = choose_events(stream)
        assert isinstance(events, JsonEvents)
        events.report("step", **FACTS)
        events.report("end", version="m@1")
    with open(reader) as stream:
        assert [json.loads(line) for line in stream] == [
            {"event": "step", **FACTS},
            {"event": "end", "version": "m@1"},
        ]


def test_a_terminal_gets_a_line_that_each_step_renews_and_events_above_it():
    leader, follower = os.openpty()
    with open(follower, "w") as stream:
        events = choose_events(stream)
        assert isinstance(events, TerminalEvents)
        events.report("step", **STEP)
        events.report("checkpoint", version="m@1", step=7)
    first, second = read_terminal(leader).split("\r\x1b[K")[1:]
    assert first.startswith("epoch 2, step 7, 25%  2,000 images/s  loss 0.5000  rate 0.1  data stall 25%")
    assert second.strip() == "checkpoint: version m@1, step 7"


def test_the_time_left_is_what_the_rest_takes_at_the_speed_so_far():
    clock = iter([100.0, 100.0, 190.0])
    line = ProgressLine(lambda: next(clock))
    assert line.update(STEP).endswith("time left unknown")
    assert line.update({**STEP, "progress": 0.5}).endswith("0:00 left")
    assert line.update({**STEP, "progress": 0.75}).endswith("0:45 left")
