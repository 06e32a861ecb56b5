"""Models, clusters and candidates for the tests of planning."""

from hypothesis import strategies as st

from datasvc.trainer.recipes.layouts.layout import Layout
from datasvc.trainer.recipes.planning.candidate import Candidate
from datasvc.trainer.recipes.planning.memory import StateBytes
from datasvc.trainer.recipes.planning.model_costs import transformer_costs
from datasvc.trainer.recipes.planning.step_time import ComputeTimes
from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, Link

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
