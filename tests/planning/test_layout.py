"""The plan of a layout: coordinates, peers and data ranks, and what is refused with which sizes."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.planning.layout import (
    AXES,
    PIPELINE_SCHEDULES,
    Layout,
    ModelSizes,
    check_layout,
    fit_layout,
    parse_layout,
    plan_layout,
    replica_size_of,
)
from tests.examples import examples

SIZES = st.integers(1, 3)
LAYOUTS = st.builds(
    Layout, data=SIZES, shard=SIZES, tensor=SIZES, pipeline=SIZES, context=SIZES, replica=st.integers(1, 2)
)
GPT = ModelSizes(layers=6, heads=6, width=384, block=1024, splits_tokens=True)


@examples(50)
@given(LAYOUTS)
def test_the_text_of_a_layout_gives_the_layout_back(layout):
    assert parse_layout(str(layout), layout.size) == layout


@pytest.mark.parametrize(
    ("text", "world_size", "expected"),
    [
        ("shard=2,tensor=2", 8, Layout(data=2, shard=2, tensor=2)),
        ("tensor=4", 4, Layout(tensor=4)),
        (" pipeline = 2 , data=1", 2, Layout(pipeline=2)),
        ("replica=2,shard=2", 8, Layout(replica=2, data=2, shard=2)),
        ("data=1", 1, Layout()),
    ],
)
def test_a_missing_data_axis_is_what_the_others_leave(text, world_size, expected):
    assert parse_layout(text, world_size) == expected


@examples(50)
@given(LAYOUTS)
def test_peers_of_an_axis_differ_in_that_axis_only(layout):
    plan = plan_layout(layout)
    assert len(plan.ranks) == layout.size
    for rank, axis in itertools.product(plan.ranks, AXES):
        peers = [plan.ranks[peer] for peer in rank.peers[axis]]
        assert [peer.coordinates[axis] for peer in peers] == list(range(layout.size_of(axis)))
        assert rank in peers
        for peer, other in itertools.product(peers, set(AXES) - {axis}):
            assert peer.coordinates[other] == rank.coordinates[other]


@examples(50)
@given(LAYOUTS)
def test_each_data_rank_has_equally_many_ranks_and_one_first_copy(layout):
    plan = plan_layout(layout)
    ranks_of = {number: [rank for rank in plan.ranks if rank.data_rank == number] for number in range(layout.size)}
    for number in range(layout.num_data_ranks):
        assert len(ranks_of[number]) == layout.num_copies
        assert sum(rank.is_first_copy for rank in ranks_of[number]) == 1
    assert not any(ranks_of[number] for number in range(layout.num_data_ranks, layout.size))


def test_ranks_are_numbered_as_in_a_mesh_with_tensor_inside():
    plan = plan_layout(Layout(data=2, tensor=2, pipeline=2))
    assert plan.shape == (1, 2, 2, 1, 1, 2)
    place = {"replica": 0, "pipeline": 1, "data": 0, "shard": 0, "context": 0, "tensor": 1}
    assert plan.ranks[5].coordinates == place
    assert plan.ranks[5].peers["pipeline"] == (1, 5)
    assert plan.ranks[5].peers["tensor"] == (4, 5)
    assert [rank.data_rank for rank in plan.ranks] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_replica_has_consecutive_ranks_and_data_ranks_of_its_own():
    layout = Layout(replica=2, pipeline=2, shard=2)
    assert str(layout) == "replica=2,shard=2,pipeline=2"
    plan = plan_layout(layout)
    assert plan.ranks[5].peers["replica"] == (1, 5)
    assert [rank.coordinates["replica"] for rank in plan.ranks] == [0] * 4 + [1] * 4
    assert [rank.data_rank for rank in plan.ranks] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert (layout.num_data_ranks, layout.replica_data_ranks, layout.num_copies) == (4, 2, 2)
    assert layout.without_replica() == Layout(data=2, pipeline=2, shard=2)


def test_a_copy_of_the_model_has_consecutive_ranks_in_an_elastic_job():
    plan = plan_layout(fit_layout("data=2,pipeline=2,shard=2", 12))
    assert plan.shape == (1, 3, 2, 2, 1, 1)
    assert [rank.coordinates["data"] for rank in plan.ranks] == [0] * 4 + [1] * 4 + [2] * 4
    assert plan.ranks[5].peers["pipeline"] == (5, 7)
    assert [rank.data_rank for rank in plan.ranks[4:8]] == [2, 3, 2, 3]


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("depth=2", 2, "the axes are replica, data, shard, tensor, pipeline, context"),
        ("shard", 2, "'shard' is not AXIS=SIZE"),
        ("shard=0", 2, "'shard=0' is not AXIS=SIZE"),
        ("shard=²", 2, "is not AXIS=SIZE"),
        ("", 2, "'' is not AXIS=SIZE"),
        ("shard=2,shard=2", 4, "names shard twice"),
        ("shard=3", 4, "need a multiple of 3 ranks, and there are 4; shard may be 1, 2, 4"),
        ("shard=2,tensor=3", 8, "tensor may be 1, 2, 4"),
        ("data=2,shard=2", 8, "layout data=2,shard=2 needs 4 ranks, and there are 8; shard may be 1, 2, 4, 8"),
        ("data=3", 4, "leave out data to derive it"),
    ],
)
def test_a_text_that_is_no_layout_of_the_ranks_is_refused(text, world_size, message):
    with pytest.raises(ConfigError) as refusal:
        parse_layout(text, world_size)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
        (Layout(shard=4), {"world_size": 2}, "needs 4 ranks, and there are 2; shard may be 1, 2"),
        (Layout(data=2, shard=2), {"global_batch": 6}, "data x shard may be 1, 2, 3, 6"),
        (Layout(replica=2, shard=2), {"global_batch": 6}, "replica x data x shard may be 1, 2, 3, 6"),
        (Layout(tensor=4), {"sizes": GPT}, "the model has 6; tensor may be 1, 2, 3, 6"),
        (Layout(tensor=2), {"sizes": ModelSizes()}, "no plan for `tensor`"),
        (Layout(pipeline=4), {"sizes": GPT, "micro_batch": 2}, "pipeline may be 1, 2, 3, 6"),
        (
            Layout(pipeline=2),
            {"sizes": GPT, "micro_batch": 1, "pipeline_schedule": "interleaved"},
            "cuts the layers into 4 stages, and the model has 6; pipeline may be 1, 3",
        ),
        (Layout(pipeline=2), {"sizes": ModelSizes(), "micro_batch": 1}, "the model cannot be cut"),
        (Layout(pipeline=2), {}, "8 samples in micro-batches of 8; micro_batch may be 1, 2, 4"),
        (Layout(pipeline=2), {"micro_batch": 3}, "micro_batch may be 1, 2, 4"),
        (
            Layout(pipeline=3),
            {"micro_batch": 3, "pipeline_schedule": "interleaved", "global_batch": 12},
            "may be 1, 2, 4",
        ),
        (
            Layout(pipeline=4),
            {"micro_batch": 1, "global_batch": 2},
            "use a batch per data rank that is a multiple of 4",
        ),
        (Layout(pipeline=2), {"micro_batch": 1, "pipeline_schedule": "x"}, "expected one of gpipe, 1f1b"),
        *(
            (
                Layout(pipeline=2, **{axis: 2}),
                {"micro_batch": 1, "pipeline_schedule": "zbv"},
                "schedule zbv, which goes with data, tensor and pipeline; use another schedule",
            )
            for axis in ("shard", "context")
        ),
        (Layout(context=3), {"sizes": GPT}, "a block has 1024 tokens; context may be 1, 2, 4"),
        (Layout(context=2), {"sizes": ModelSizes(heads=6)}, "a model with a method `split_tokens`"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_sizes_that_would_do(layout, settings, message):
    with pytest.raises(ConfigError) as refusal:
        check_layout(layout, **{"world_size": layout.size, "global_batch": 8, **settings})
    assert message in str(refusal.value)


@examples(50)
@given(LAYOUTS, st.sampled_from(PIPELINE_SCHEDULES))
def test_a_layout_whose_sizes_all_divide_is_accepted(layout, schedule):
    sizes = ModelSizes(layers=12, heads=6, width=384, block=12, splits_tokens=True)
    if schedule == "zbv":
        layout = Layout(data=layout.data, pipeline=layout.pipeline, tensor=layout.tensor)
    micro_batch = None if layout.pipeline == 1 else 2
    global_batch = layout.num_data_ranks * layout.pipeline * 4
    check_layout(
        layout,
        world_size=layout.size,
        global_batch=global_batch,
        micro_batch=micro_batch,
        sizes=sizes,
        pipeline_schedule=schedule,
    )


def test_the_axis_context_needs_no_heads():
    check_layout(Layout(context=2), world_size=2, global_batch=8, sizes=ModelSizes(block=12, splits_tokens=True))


def test_a_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="tensor is 0; expected at least 1"):
        Layout(tensor=0)


def test_only_replicas_are_data_only():
    assert Layout(data=4).is_data_only
    assert Layout().is_data_only
    assert not Layout(data=2, shard=2).is_data_only
    assert not Layout(replica=2, data=2).is_data_only


def test_a_layout_is_planned_without_torch():
    program = "import sys, datasvc.planning.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "size", "fitted"),
    [
        ("replica=3,shard=2", 2, Layout(replica=2, shard=2)),
        ("replica=3,data=2,shard=2", 4, Layout(replica=2, data=2, shard=2)),
        ("data=4,tensor=2", 2, Layout(data=2, tensor=2)),
        ("shard=2", 2, Layout(data=2, shard=2)),
        ("data=4", 1, Layout(data=2)),
    ],
)
def test_the_outermost_axis_of_an_elastic_layout_takes_what_the_ranks_make(text, size, fitted):
    assert replica_size_of(text) == size
    assert fit_layout(text, 2 * size) == replace(fitted, is_elastic=True)
    if size > 1:
        with pytest.raises(ConfigError, match=f"a replica has {size} ranks, and there are {size + 1}"):
            fit_layout(text, size + 1)
