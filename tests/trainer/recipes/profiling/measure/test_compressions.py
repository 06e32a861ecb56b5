import dataclasses

import pytest

from datasvc.planning.step import Message, StepCosts, StepMode, step_time
from datasvc.trainer.recipes.profiling.measure.compressions import ReduceCost, describe_compressed, predict_compressed

COSTS = StepCosts(
    io_s=0.01,
    ahead_s=0.01,
    caller_s=0.0,
    transfer_s=0.0,
    forward_s=0.1,
    backward_s=0.2,
    launch_s=0.02,
    messages=(Message(1_000, 0.2, 0.3), Message(3_000, 0.3, 0.9)),
    skew_s=0.0,
    update_s=0.05,
)
PLAIN = ReduceCost("none", own_s=0.02, wire_s=1.2, beside_s=0.1)


def test_a_step_with_the_compression_of_the_run_is_the_step_of_the_profile():
    (step,) = predict_compressed(COSTS, [PLAIN])
    assert step.step_s == step_time(COSTS, StepMode.OVERLAPPED)
    assert (step.launch_s, step.reduce_s) == (COSTS.launch_s, COSTS.reduce_s)


def test_a_compression_that_halves_the_wire_time_halves_the_messages_and_adds_its_own_work():
    _, step = predict_compressed(COSTS, [PLAIN, ReduceCost("fp16", own_s=0.05, wire_s=0.6, beside_s=0.1)])
    assert (step.launch_s, step.reduce_s) == pytest.approx((0.05, 0.6))
    # Messages are ready at 0.2 and 0.3: the second ends at 0.35 + 0.45, and the passes at 0.3.
    assert step.step_s == pytest.approx(0.3 + 0.5 + 0.05 + 0.05)


def test_a_base_with_almost_no_wire_time_adds_the_difference_to_the_messages_in_proportion():
    base = dataclasses.replace(PLAIN, own_s=0.02, wire_s=0.001)
    same, longer = predict_compressed(COSTS, [base, ReduceCost("fp16", own_s=0.02, wire_s=0.121, beside_s=0.1)])
    assert same.reduce_s == COSTS.reduce_s
    assert longer.reduce_s == pytest.approx(1.2 + 0.12)
    # The second message ends at 0.3 + 0.33 + 0.99 - 0.1 after the start of the backward pass.
    assert longer.step_s == pytest.approx(same.step_s + 0.12)


def test_the_line_below_the_table_names_the_fastest_compression_or_says_that_none_pays():
    fast = ReduceCost("quantized:int8", own_s=0.05, wire_s=0.3, beside_s=0.1)
    slow = ReduceCost("quantized:int4", own_s=2.0, wire_s=0.15, beside_s=0.1)
    lines = describe_compressed(predict_compressed(COSTS, [PLAIN, slow, fast]))
    assert lines[-1].startswith("--compression quantized:int8 pays on this link: a step takes ")
    assert lines[-1].endswith(f"ms instead of {step_time(COSTS, StepMode.OVERLAPPED) * 1e3:.1f}")
    lines = describe_compressed(
        predict_compressed(COSTS, [PLAIN, slow, dataclasses.replace(PLAIN, compression="fp16")])
    )
    assert lines[-1] == "none of these pays on this link: at best a step takes 100%"
