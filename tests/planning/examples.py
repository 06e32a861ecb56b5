"""Models, clusters and candidates for the tests of planning."""

from hypothesis import strategies as st

from datasvc.planning.candidates import Candidate
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.layout import Layout
from datasvc.planning.layout_step import ComputeTimes
from datasvc.planning.memory import StateBytes
from datasvc.planning.model_costs import transformer_costs
from datasvc.planning.step import Message, StepCosts

# 8 blocks and 4 heads, without embeddings to speak of.
SMALL_GPT = transformer_costs("gpt", layers=8, heads=4, width=64, vocabulary=16, tokens=32)
ADAM = StateBytes(parameter=4, gradient=4, optimizer=8)
TIMES = ComputeTimes(forward_s=1.0, backward_s=2.0, update_s=0.5)
ONE_NODE = Cluster(1, Link(1e9, 1e-5), 4)

layouts = st.builds(
    Layout,
    data=st.sampled_from([1, 2]),
    shard=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
)


@st.composite
def candidates(draw):
    layout = draw(layouts)
    return Candidate(
        layout,
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        num_micro_batches=draw(st.sampled_from([8, 16])),
        recompute=draw(st.booleans()),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zbv"])) if layout.pipeline > 1 else "1f1b",
        zero=draw(st.sampled_from([0, 1, 2, 3])),
    )


links = st.builds(Link, bytes_per_s=st.floats(1e6, 1e12), latency_s=st.floats(0, 1e-3))
clusters = st.builds(
    Cluster,
    num_nodes=st.integers(1, 8),
    network=links,
    ranks_per_node=st.sampled_from([1, 2, 4, 8]),
    inside=st.none() | links,
    message_s=st.sampled_from([0.0, 1e-4]),
)


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
