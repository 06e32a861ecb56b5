"""The ranking of layouts, as a table and as JSON values."""

import dataclasses
import json

import pytest

from datasvc.errors import ConfigError
from datasvc.planning.candidates import Choices
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.layout import Layout
from datasvc.planning.layout_step import PlannedWork
from datasvc.planning.ranking import rank_layouts
from tests.planning.examples import ADAM, ONE_NODE, SMALL_GPT, TIMES

WORKLOAD = PlannedWork(SMALL_GPT, TIMES, ADAM, "fp32", global_batch=8)


def rank(workload=WORKLOAD, cluster=ONE_NODE, **choices):
    return rank_layouts(workload, cluster, Choices(**choices))


def test_every_layout_is_ranked_or_refused():
    ranking = rank()
    assert len(ranking.ranked) + len(ranking.refused) == 15
    layouts = [each.candidate.layout for each in ranking.ranked] + [each.layout for each in ranking.refused]
    assert len(set(layouts)) == 15
    steps_s = [each.step.step_s for each in ranking.ranked]
    assert steps_s == sorted(steps_s)


def test_without_costs_of_communication_the_best_layout_divides_the_update():
    free = Cluster(1, Link(float("inf"), 0.0), 4)
    best = rank(cluster=free).ranked[0]
    # Two samples of three seconds, and a quarter of the update.
    assert best.step.step_s == pytest.approx(2 * 3.0 + 0.5 / 4)
    assert best.candidate.layout == Layout(shard=4)


def test_zbv_is_not_tried_with_axes_that_divide_parameters():
    ranking = rank(schedules=("zbv",))
    pipelines = [each.candidate.layout for each in ranking.ranked if each.candidate.layout.pipeline > 1]
    assert Layout(pipeline=4) in pipelines
    assert Layout(data=2, pipeline=2) in pipelines
    assert Layout(shard=2, pipeline=2) not in pipelines
    refused = next(each for each in ranking.refused if each.layout == Layout(shard=2, pipeline=2))
    assert "does not work with the schedule zbv" in refused.reason


def test_of_equally_fast_candidates_the_one_with_the_largest_passes_is_taken():
    (alone,) = rank(cluster=Cluster(1, Link(1.0), 1)).ranked
    assert (alone.candidate.micro_batch, alone.candidate.recompute) == (8, False)


def test_a_small_memory_takes_smaller_passes_then_recomputation_then_refuses():
    cluster = Cluster(1, Link(1e9), 1)

    def best(memory_bytes):
        ranking = rank(dataclasses.replace(WORKLOAD, memory_bytes=memory_bytes), cluster)
        return ranking, ranking.ranked[0].candidate if ranking.ranked else None

    enough = rank(WORKLOAD, cluster, recompute=(False,)).ranked[0].memory.total
    _, candidate = best(enough - 1)
    assert (candidate.micro_batch, candidate.recompute) == (4, False)
    small = rank(WORKLOAD, cluster, recompute=(False,), micro_batches=(1,)).ranked[0].memory.total
    _, candidate = best(small - 1)
    assert candidate.recompute
    ranking, candidate = best(1e6)
    assert candidate is None
    (refused,) = ranking.refused
    assert "MB with 8 x 1, recompute, and a device has 1.00 MB: parameters" in refused.reason
    assert "no layout fits; use more ranks" in ranking.describe(10)


def test_the_table_has_the_fastest_layouts_and_the_flags_of_the_best():
    ranking = rank(schedules=("1f1b",))
    lines = ranking.describe(2).splitlines()
    assert lines[0].startswith("gpt, 0.4 M parameters, fp32; 8 blocks per step")
    assert lines[1] == "number of nodes: 1; nodes of 4 ranks, 1 GB/s and 10 us between them"
    assert lines[3].split()[:3] == ["layout", "settings", "memory"]
    assert [line.split()[0] for line in lines[4:6]] == ["1", "2"]
    assert lines[6] == f"and {len(ranking.ranked) - 2} more that fit"
    best = ranking.ranked[0].candidate
    # The training divides the global batch over the data ranks as the plan does, at any layout.
    assert lines[-1].startswith(f"best: --layout {best.layout} --global-batch 8 --micro-batch {best.micro_batch}")
    # Parts that no layout of the table has are left out.
    assert "tensor ms" not in lines[3]


def test_flags_name_what_differs_from_a_run_without_a_layout():
    ranking = rank(schedules=("gpipe",), recompute=(True,), zero_stages=(2,))
    for each in ranking.ranked:
        alone = dataclasses.replace(ranking, ranked=[each])
        flags = alone.describe(1).splitlines()[-1]
        layout = each.candidate.layout
        assert ("--pipeline-schedule gpipe" in flags) == (layout.pipeline > 1)
        assert ("--zero 2" in flags) == (layout.shard > 1)
        assert "--recompute" in flags


def test_layouts_with_the_same_problem_are_one_line():
    ranking = rank(cluster=Cluster(2, Link(1e9), 8))
    lines = ranking.describe(1).splitlines()
    start = next(number for number, line in enumerate(lines) if line.endswith("layouts do not fit:"))
    reasons = lines[start + 1 : lines.index("", start)]
    assert len(reasons) < len(ranking.refused)
    assert sum(int(line.split(",")[0]) for line in reasons) == len(ranking.refused)
    assert any("tensor may be 1, 2, 4" in line for line in reasons)


def test_one_layout_that_does_not_fit_is_one():
    ranking = rank(cluster=Cluster(2, Link(1e9), 8))
    assert "\n1 layout does not fit:\n" in dataclasses.replace(ranking, refused=ranking.refused[:1]).describe(1)


def test_json_has_every_layout_with_its_parts():
    values = json.loads(json.dumps(rank().to_dict()))
    assert (values["model"], values["global_batch"], values["ranks_per_node"]) == ("gpt", 8, 4)
    first = values["ranked"][0]
    assert first["step_s"] == pytest.approx(sum(first["step"].values()))
    assert first["memory_bytes"] == pytest.approx(sum(first["memory"].values()))
    assert first["samples_per_s"] == pytest.approx(8 / first["step_s"])
    assert len(values["ranked"]) + len(values["refused"]) == 15
    assert isinstance(first["layout"], str)


def test_a_batch_of_no_samples_is_refused():
    with pytest.raises(ConfigError, match="global_batch is 0; expected at least 1"):
        dataclasses.replace(WORKLOAD, global_batch=0)
