"""Duration of a step: by hand, and by laws."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.planning.candidates import GLOO, Candidate, ExecutionTraits
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.layout import AXES, PIPELINE_SCHEDULES, Layout, plan_layout
from datasvc.planning.layout_step import (
    ComputeTimes,
    PlannedWork,
    estimate_step,
    idle_s,
    peers_of_first,
    rate_compute,
)
from datasvc.planning.model_costs import ModelCosts, PartCosts
from tests.planning.examples import ADAM, SMALL_GPT, TIMES, candidates, clusters, layouts

ALONE = Layout()
NO_OVERLAP = ExecutionTraits(overlap=0.0)
# Memory that takes no time, so that copies are free.
FREE_UPDATE = dataclasses.replace(TIMES, update_s=0.0)
# Four blocks with all FLOPs and all parameters; the output of a block is 25 numbers, 100 bytes.
MODEL = ModelCosts(
    "m", "blocks", PartCosts(), PartCosts(0, 100, 10.0), PartCosts(), layers=4, boundary_elements=25, heads=4
)
CLUSTER = Cluster(1, Link(100.0, 0.5), 8)


def step(layout=ALONE, *, model=MODEL, times=TIMES, cluster=CLUSTER, traits=NO_OVERLAP, **settings):
    return estimate_step(
        PlannedWork(model, times, ADAM, "fp32", 1, traits=traits), Candidate(layout, **settings), cluster
    )


@given(layouts, st.sets(st.sampled_from(AXES), min_size=1))
def test_peers_are_those_of_the_plan_of_the_layout(layout, axes):
    place = plan_layout(layout).ranks
    expected = [each.rank for each in place if not any(each.coordinates[axis] for axis in AXES if axis not in axes)]
    assert peers_of_first(layout, *axes) == expected


def test_one_rank_computes_and_does_not_communicate():
    found = step(micro_batch=2, num_micro_batches=3)
    assert found.compute_s == pytest.approx(3 * 2 * (1.0 + 2.0))
    assert found.step_s == pytest.approx(18.0 + 0.5)


@given(clusters, st.sampled_from([1, 2, 4]), st.booleans(), st.floats(0, 1))
def test_one_rank_needs_no_link(cluster, micro_batch, recompute, overlap):
    found = step(micro_batch=micro_batch, recompute=recompute, cluster=cluster, traits=ExecutionTraits(overlap))
    assert found.step_s == pytest.approx(micro_batch * (3.0 + recompute) + 0.5)


def test_recomputation_adds_a_forward_pass():
    assert step(recompute=True).compute_s == pytest.approx(1.0 + 2.0 + 1.0)


def test_a_tensor_group_has_four_all_reduces_of_each_block():
    found = step(Layout(tensor=2))
    assert found.compute_s == pytest.approx(1.5)
    # Shoeybi et al. 2019: two all-reduces forward, two backward; each takes 2 * (0.5 + 0.5) s here. The exchange of
    # queries, keys and values sends a quarter of 3 * 100 bytes once in each direction.
    assert found.tensor_s == pytest.approx(4 * 4 * 2.0 + 4 * 2 * (0.5 + 0.75))
    # Recomputation repeats the forward pass with its all-reduces.
    assert step(Layout(tensor=2), recompute=True).tensor_s == pytest.approx(1.5 * found.tensor_s)


def test_the_dispatch_of_divided_layers_occurs_in_each_block_and_pass():
    times = dataclasses.replace(TIMES, divided_block_s=0.25)
    found = step(Layout(tensor=2), times=times, num_micro_batches=3)
    assert found.tensor_s - step(Layout(tensor=2), num_micro_batches=3).tensor_s == pytest.approx(3 * 4 * 0.25)
    assert step(times=times).tensor_s == 0


def test_a_context_group_gathers_keys_and_values_and_sums_their_gradients():
    found = step(Layout(context=2), zero=2)
    assert found.compute_s == pytest.approx(1.5)
    # Keys and values of 100 bytes each, of four blocks: half of them comes in a message; the same backward.
    assert found.context_s == pytest.approx(4 * 2 * 2 * (0.5 + 0.5))


def test_a_pipeline_sends_boundaries_and_waits_in_its_bubble():
    found = step(Layout(pipeline=2), num_micro_batches=4)
    assert found.compute_s == pytest.approx(4 * 1.5)
    # 100 bytes take 1.5 s, forward and backward.
    assert found.send_s == pytest.approx(4 * 2 * 1.5)
    assert found.idle_s == pytest.approx(1.5 + 2 * 1.5)
    assert found.update_s == pytest.approx(0.25)


def test_the_slowest_rank_of_a_pipeline_sets_the_pace():
    # The logits cost as much as the blocks.
    model = dataclasses.replace(MODEL, last=PartCosts(0, 0, 40.0), boundary_elements=0.0)
    cluster = Cluster(1, Link(math.inf, 0.0), 8)
    found = step(Layout(pipeline=2), model=model, cluster=cluster, num_micro_batches=4)
    assert found.compute_s == pytest.approx(4 * 3.0 * 0.75)
    assert found.idle_s == pytest.approx(3.0 * 0.25)


def test_the_ends_of_a_pipeline_add_the_gradients_of_tied_weights():
    model = dataclasses.replace(MODEL, tied_parameters=25)
    assert step(Layout(pipeline=2), model=model).data_s == pytest.approx(2 * (0.5 + 0.5))
    assert step(Layout(pipeline=2), model=model, schedule="zbv").data_s == 0


def test_replicas_add_up_their_gradients_once_per_step():
    # 1600 bytes over four ranks: 2 * 3 * (0.5 + 4) s.
    assert step(Layout(data=4)).data_s == pytest.approx(27.0)
    assert step(Layout(data=4), num_micro_batches=8).data_s == pytest.approx(27.0)


def test_replicas_of_a_pipeline_add_up_their_gradients_when_nothing_else_runs():
    # 800 bytes of a stage over two ranks: 2 * (0.5 + 4) s; GPUs hide none of it.
    found = step(Layout(data=2, pipeline=2), num_micro_batches=4, traits=ExecutionTraits(overlap=1.0))
    assert found.data_s == pytest.approx(9.0)
    assert found.shard_s == 0


def test_zero_3_gathers_twice_and_reduces_once_in_each_pass():
    # Four blocks and the rest: five units of 320 bytes over two ranks, each in one message of 160 bytes.
    unit_s = 0.5 + 1.6

    def find(**settings):
        return step(Layout(shard=2), times=FREE_UPDATE, **settings).shard_s

    assert find(zero=3) == pytest.approx(3 * 5 * unit_s)
    assert find(zero=2) == pytest.approx(2 * 5 * unit_s)
    assert find(zero=3, num_micro_batches=4) == pytest.approx(4 * 3 * 5 * unit_s)
    # A reduce-scatter of gloo is an all-reduce.
    assert find(zero=2, traits=GLOO) == pytest.approx((1 + 2) * 5 * unit_s)
    assert step(Layout(shard=2), zero=3).update_s == pytest.approx(0.25)


def test_a_pipeline_gathers_in_each_forward_pass_and_once_in_the_backward_passes():
    # The first rank has two blocks and the rest: three units of 2/3 of 800 bytes over two ranks.
    unit_s = 0.5 + 800 / 3 / 2 / 100

    def find(zero):
        layout = Layout(shard=2, pipeline=2)
        return step(layout, times=FREE_UPDATE, zero=zero, num_micro_batches=4).shard_s

    assert find(3) == pytest.approx((4 + 1 + 1) * 3 * unit_s)
    # Without freeing them, once per step.
    assert find(2) == pytest.approx((1 + 1) * 3 * unit_s)


def test_fsdp_copies_parameters_and_gradients_as_fast_as_an_update():
    # The update moves 28 bytes of each of 400 parameters in 0.5 s. A gather copies 800 and 1600 bytes, reading and
    # writing them, a reduce-scatter 1600 bytes, and gloo once more.
    copied_s = 0.5 * (2 * 2400 + 2 * 1600) / (28 * 400)
    free = step(Layout(shard=2), times=FREE_UPDATE, zero=2)
    assert step(Layout(shard=2), zero=2).shard_s - free.shard_s == pytest.approx(copied_s)
    free = step(Layout(shard=2), times=FREE_UPDATE, zero=2, traits=GLOO)
    gloo_s = step(Layout(shard=2), zero=2, traits=GLOO).shard_s - free.shard_s
    assert gloo_s - copied_s == pytest.approx(0.5 * 2 * 1600 / (28 * 400))


def test_zero_1_adds_gradients_as_replicas_do_and_gathers_what_is_updated():
    found = step(Layout(data=2, shard=2), zero=1, num_micro_batches=4)
    assert found.data_s == step(Layout(data=4)).data_s
    assert found.shard_s == pytest.approx(5 * (0.5 + 1.6))
    assert found.update_s == pytest.approx(0.25)


def test_replicas_of_divided_models_add_gradients_in_each_pass():
    # FSDP; each rank of the tensor group has half of 1600 bytes.
    found = step(Layout(data=2, tensor=2), times=FREE_UPDATE, zero=3, num_micro_batches=4)
    assert (found.shard_s, found.data_s) == (0, pytest.approx(4 * 2 * (0.5 + 4.0)))


def test_replicas_of_shards_add_up_a_part_of_the_gradients_each():
    # Half of 1600 bytes over two ranks.
    assert step(Layout(data=2, shard=2), zero=3).data_s == pytest.approx(2 * (0.5 + 4.0))


def test_computation_hides_collectives_but_not_the_last_unit():
    # 27 s of all-reduces; four of five units are hidden by 2 s of the backward pass.
    assert step(Layout(data=4), traits=ExecutionTraits()).data_s == pytest.approx(27.0 - 2.0 * 4 / 5)
    fast = Cluster(1, Link(1e5, 0.0), 8)
    hidden = step(Layout(data=4), traits=ExecutionTraits(), cluster=fast).data_s
    assert hidden == pytest.approx(step(Layout(data=4), cluster=fast).data_s / 5)


def test_ranks_that_share_processors_use_what_a_waiting_rank_leaves():
    model = dataclasses.replace(MODEL, last=PartCosts(0, 0, 40.0), boundary_elements=0.0)
    cluster = Cluster(1, Link(math.inf, 0.0), 8)
    settings = {"model": model, "cluster": cluster, "num_micro_batches": 4}
    # The first rank has a quarter of the work, the second one three quarters.
    found = step(Layout(pipeline=2), **settings, traits=ExecutionTraits(0.0, 0.5))
    assert found.compute_s == pytest.approx(4 * 3.0 * 0.5)
    assert found.idle_s == 0
    # With more processors, the second rank sets the pace: 0.9 of 4 * 2.25 s, and of the bubble.
    found = step(Layout(pipeline=2), **settings, traits=ExecutionTraits(0.0, 0.9))
    assert found.compute_s + found.idle_s == pytest.approx(0.9 * (4 * 3.0 * 0.75 + 3.0 * 0.25))


@pytest.mark.parametrize("processors", [0.0, 1.5, math.nan])
def test_a_share_of_processors_that_cannot_be_is_refused(processors):
    with pytest.raises(ConfigError, match=r"processors_per_rank is .*; expected more than 0, and at most 1"):
        ExecutionTraits(0.0, processors)


def test_an_overlap_of_more_than_all_is_refused():
    with pytest.raises(ConfigError, match=r"overlap is 1\.5; expected a number from 0"):
        ExecutionTraits(overlap=1.5)


def test_a_rate_gives_the_times_of_a_device():
    times = rate_compute(MODEL, 20.0, states=ADAM, memory_bytes_per_s=1000.0)
    # 40 FLOPs forward, twice as many backward. The update moves 2 * 4 + 4 + 2 * 8 bytes of each of 400 parameters.
    assert dataclasses.astuple(times) == pytest.approx((2.0, 4.0, 11.2, 0.0))
    assert rate_compute(MODEL, 20.0, states=ADAM).update_s == 0


@pytest.mark.parametrize("times", [(0.0, 1.0), (-1.0, 1.0), (1.0, math.nan)])
def test_times_that_cannot_be_are_refused(times):
    with pytest.raises(ConfigError, match="expected finite numbers"):
        ComputeTimes(*times)


def small(candidate, cluster, overlap=0.5):
    work = PlannedWork(SMALL_GPT, TIMES, ADAM, "fp32", 1, traits=ExecutionTraits(overlap))
    return estimate_step(work, candidate, cluster)


@given(candidates(), clusters)
def test_no_part_is_negative_and_the_computation_is_divided_at_most_by_all_ranks(candidate, cluster):
    found = small(candidate, cluster)
    assert min(dataclasses.astuple(found)) >= 0
    copies = candidate.layout.tensor * candidate.layout.pipeline * candidate.layout.context
    samples = candidate.micro_batch * candidate.num_micro_batches
    assert found.compute_s >= 3.0 * samples / copies * (1 - 1e-9)


@given(candidates(), clusters, st.floats(1, 10))
def test_slower_links_never_make_a_step_faster(candidate, cluster, factor):
    slower = dataclasses.replace(
        cluster,
        network=Link(cluster.network.bytes_per_s / factor, cluster.network.latency_s * factor),
        inside=cluster.inside and Link(cluster.inside.bytes_per_s / factor, cluster.inside.latency_s * factor),
    )
    assert small(candidate, slower).step_s >= small(candidate, cluster).step_s * (1 - 1e-9)


@given(candidates(), clusters, st.floats(0, 1), st.floats(0, 1))
def test_more_overlap_never_makes_a_step_slower(candidate, cluster, less, more):
    less, more = sorted((less, more))
    found_less, found_more = small(candidate, cluster, less).step_s, small(candidate, cluster, more).step_s
    assert found_more <= found_less * (1 + 1e-9)


sizes = st.integers(1, 16)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_without_a_pipeline_no_rank_is_idle(schedule):
    assert idle_s(schedule, [1.0], [2.0]) == 0


@given(sizes, sizes)
def test_the_bubble_of_gpipe_is_that_of_huang(pipeline, num_micro_batches):
    bubble_s = idle_s("gpipe", [1.0] * pipeline, [2.0] * pipeline)
    # O((K - 1) / (M + K - 1)) of the step (Huang et al. 2019, section 2.3).
    share = (pipeline - 1) / (num_micro_batches + pipeline - 1)
    assert bubble_s / (bubble_s + 3.0 * num_micro_batches) == pytest.approx(share)


@given(sizes, sizes)
def test_the_bubbles_of_1f1b_and_of_interleaving_are_those_of_narayanan(pipeline, num_micro_batches):
    ideal_s = 3.0 * num_micro_batches
    forward_s, backward_s = [1.0] * pipeline, [2.0] * pipeline
    # (p - 1) / m and (p - 1) / (v m) of the ideal time (Narayanan et al. 2021, sections 2.2.1 and 2.2.2), with v = 2.
    share = (pipeline - 1) / num_micro_batches
    assert idle_s("1f1b", forward_s, backward_s) / ideal_s == pytest.approx(share)
    assert idle_s("interleaved", forward_s, backward_s) / ideal_s == pytest.approx(share / 2)


def test_zbv_has_no_bubble_if_both_halves_of_a_backward_pass_take_as_long_as_a_forward_pass():
    assert idle_s("zbv", [1.0] * 4, [2.0] * 4) == 0
    assert idle_s("zbv", [2.0] * 4, [2.0] * 4) == pytest.approx(3.0)


def test_a_slower_rank_makes_the_others_wait():
    assert idle_s("1f1b", [1.0, 2.0, 1.0], [1.0, 2.0, 1.0]) == pytest.approx(4.0)
