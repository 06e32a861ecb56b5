"""A small GPT trained on every axis of a layout, alone and in pairs, has the losses that one process has."""

import json
import sys

import pytest

pytestmark = pytest.mark.slow

NUM_STEPS = 50
FEW_STEPS = 5
TIMEOUT_S = 600.0  # ranks that wait for each other in every layer are slow where they share processors
# One program runs the layouts of a list in turn: starting four ranks takes longer than training on them.
LONG_RUNS = [
    {"layout": "shard=4"},
    {"layout": "pipeline=4", "micro_batch": 2},
    {"layout": "data=2,pipeline=2", "micro_batch": 2},
]
PAIRS = [
    {"layout": "tensor=4"},
    {"layout": "data=2,shard=2"},
    {"layout": "data=2,tensor=2"},
    {"layout": "shard=2,tensor=2"},
    {"layout": "shard=2,pipeline=2", "micro_batch": 2},
    {"layout": "tensor=2,pipeline=2", "micro_batch": 4},
]
OPTIONS = [
    {"layout": "data=2,shard=2", "zero": 1},
    {"layout": "shard=4", "zero": 2, "micro_batch": 1},
    {"layout": "shard=4", "recompute": True, "offload": True},
    {"layout": "data=4", "recompute": True},
    {"layout": "shard=4", "optimizer": "lars", "learning_rate": 1.0},
    {"layout": "shard=4", "optimizer": "lamb"},
    {"layout": "pipeline=4", "micro_batch": 2, "pipeline_schedule": "gpipe"},
    {"layout": "data=2,pipeline=2", "micro_batch": 2, "pipeline_schedule": "interleaved"},
    {"layout": "tensor=2,pipeline=2", "micro_batch": 2, "pipeline_schedule": "zbv"},
]
CONTEXT = [
    {"layout": "context=4"},
    {"layout": "context=4", "documents": True},
    {"layout": "data=2,context=2", "documents": True},
    {"layout": "shard=2,context=2"},
    {"layout": "tensor=2,context=2", "documents": True},
    {"layout": "pipeline=2,context=2", "documents": True, "micro_batch": 4},
]


def read_results(done):
    """Return the lines of rank 0, which the launcher marks with its number unless there is one rank."""
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture
def train(launcher):
    def run(num_ranks, num_steps, layouts):
        arguments = [json.dumps(settings) for settings in layouts]
        results = read_results(
            launcher.run_program(num_ranks, "layouts.py", num_steps, *arguments, timeout_s=TIMEOUT_S)
        )
        assert len(results) == len(layouts)
        return results

    return run


def without_layout(settings):
    """Return what a run of one process needs to have the same losses."""
    return {name: settings[name] for name in ("documents", "optimizer", "learning_rate") if name in settings}


def check_equal(result, alone):
    for name in ("losses", "val_loss", "ema_val_loss"):
        assert result[name] == pytest.approx(alone[name], abs=1e-5, rel=0), result["settings"]


def test_long_runs_have_the_losses_of_one_process_in_a_part_of_its_memory(train):
    (alone,) = train(1, NUM_STEPS, [{}])
    assert alone["losses"][-1] < 0.8 * alone["losses"][0]
    results = train(4, NUM_STEPS, LONG_RUNS)
    for result in results:
        check_equal(result, alone)
    for name in ("parameter_bytes", "optimizer_bytes"):
        assert results[0][name] <= 1.05 / 4 * alone[name]


@pytest.mark.parametrize("layouts", [PAIRS, OPTIONS, CONTEXT], ids=["pairs", "options", "context"])
def test_every_layout_and_option_has_the_losses_of_one_process(train, layouts):
    alone = train(1, FEW_STEPS, [without_layout(settings) for settings in layouts])
    for result, expected in zip(train(4, FEW_STEPS, layouts), alone, strict=True):
        check_equal(result, expected)
        if result["settings"].get("zero") == 1:
            assert result["parameter_bytes"] == expected["parameter_bytes"]
            assert result["optimizer_bytes"] <= 1.05 / 2 * expected["optimizer_bytes"]


@pytest.mark.parametrize(("lost", "work"), [(0, "step"), (2, "evaluation")])
def test_every_rank_of_a_pipeline_reports_which_rank_is_lost(launcher, lost, work):
    program = launcher.program("lost_in_pipeline.py")
    done = launcher.run(4, sys.executable, program, "pipeline=4", lost, work, timeout_s=TIMEOUT_S)
    for rank in {0, 1, 2, 3} - {lost}:
        assert f"rank {rank}: rank {lost} was lost, of 4" in done.stderr
    assert f"rank {lost} was the first to fail" in done.stderr
