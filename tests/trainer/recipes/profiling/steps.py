"""Costs of steps: one that is easy to follow, and all that can be."""

from hypothesis import strategies as st

from datasvc.trainer.recipes.profiling.predict.costs import Message, StepCosts

seconds = st.floats(0, 1, allow_subnormal=False)


@st.composite
def step_costs(draw, contention=seconds):
    forward_s, backward_s, io_s = draw(seconds), draw(st.floats(1e-6, 1)), draw(seconds)
    shares = draw(st.lists(st.tuples(st.floats(0, 1), seconds, st.integers(0, 10**9)), max_size=8))
    return StepCosts(
        io_s=io_s,
        ahead_s=io_s * draw(st.floats(0, 1)),
        caller_s=io_s * draw(st.floats(0, 1)),
        transfer_s=draw(seconds),
        forward_s=forward_s,
        backward_s=backward_s,
        launch_s=draw(seconds),
        messages=tuple(
            Message(size_bytes, min(forward_s + share * backward_s, forward_s + backward_s), reduce_s)
            for share, reduce_s, size_bytes in shares
        ),
        skew_s=draw(seconds),
        update_s=draw(seconds),
        io_beside_s=draw(seconds),
        reduce_beside_s=draw(seconds),
        contention=draw(contention),
        targets_s=draw(st.sampled_from([0.0, 0.25])),
    )


# Layers of 2, 3 and 1 s backwards, from the last to the first, each with an all-reduce of its own.
EXAMPLE = StepCosts(
    io_s=4.0,
    ahead_s=3.0,
    caller_s=0.5,
    transfer_s=0.25,
    forward_s=3.0,
    backward_s=6.0,
    launch_s=0.0,
    messages=(Message(10, 5.0, 2.0), Message(20, 8.0, 4.0), Message(30, 9.0, 1.0)),
    skew_s=0.0,
    update_s=1.0,
)
