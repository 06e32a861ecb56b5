"""A small GPT trained on every axis of a layout, alone and in pairs, has the losses that one process has.

So has a convolutional net, on the axes that it has.
"""

import json

import pytest

from datasvc.planning.candidates import Candidate
from datasvc.planning.layout import parse_layout
from datasvc.planning.memory import estimate_memory, state_bytes
from datasvc.trainer.recipes.planning.count_costs import count_costs
from tests.support import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TIMEOUT_S = 800.0  # ranks that wait for each other in every layer are slow where they share processors
VOCABULARY, BLOCK, BATCH = 29, 8, 8  # of the program
LONG, SHORT = {"steps": 20}, {"steps": 4}
# Equal to one process only if batch normalisation has the batches of all ranks.
RESNET = {"model": "resnet18", "sync_batch_norm": True, "optimizer": "sgd", "learning_rate": 0.01, **SHORT}
LAYOUTS = [
    {"layout": "shard=4", **LONG},
    {"layout": "tensor=4", **LONG},
    {"layout": "pipeline=4", "micro_batch": 2, "layers": 4, **LONG},
    {"layout": "data=2,shard=2", **LONG},
    {"layout": "data=2,tensor=2", **LONG},
    {"layout": "data=2,pipeline=2", "micro_batch": 2, **LONG},
    {"layout": "shard=2,tensor=2", **LONG},
    {"layout": "shard=2,pipeline=2", "micro_batch": 2, **LONG},
    {"layout": "tensor=2,pipeline=2", "micro_batch": 4, **LONG},
    {"layout": "data=2,shard=2", "zero": 1, **SHORT},
    {"layout": "shard=4", "zero": 2, "micro_batch": 1, **SHORT},
    {"layout": "shard=4", "recompute": True, "offload": True, **SHORT},
    {"layout": "data=4", "recompute": True, **SHORT},
    {"layout": "shard=4", "optimizer": "lars", "learning_rate": 1.0, **SHORT},
    {"layout": "shard=4", "optimizer": "lamb", **SHORT},
    {"layout": "data=2,shard=2", "zero": 1, "optimizer": "lamb", "compile": "eager", "bucket": "auto", **SHORT},
    {"layout": "shard=2,tensor=2", "optimizer": "lamb", **SHORT},
    {"layout": "pipeline=2,context=2", "optimizer": "lamb", "micro_batch": 4, **SHORT},
    {"layout": "tensor=2,pipeline=2", "optimizer": "lars", "learning_rate": 1.0, "micro_batch": 4, **SHORT},
    {"layout": "data=2,tensor=2", "optimizer": "rmsprop-sgd", **SHORT},
    {"layout": "pipeline=4", "micro_batch": 2, "pipeline_schedule": "gpipe", "layers": 4, **SHORT},
    {"layout": "data=2,pipeline=2", "micro_batch": 2, "pipeline_schedule": "interleaved", "layers": 4, **SHORT},
    {"layout": "tensor=2,pipeline=2", "micro_batch": 2, "pipeline_schedule": "zbv", "layers": 4, **SHORT},
    {
        "layout": "tensor=2,pipeline=2",
        "micro_batch": 2,
        "pipeline_schedule": "zbv",
        "layers": 4,
        "recompute": True,
        **SHORT,
    },
    {"layout": "data=2,pipeline=2", "micro_batch": 1, "pipeline_schedule": "zbv", "layers": 4, **SHORT},
    {"layout": "tensor=2,pipeline=2", "recompute": True, "micro_batch": 4, **SHORT},
    {"layout": "shard=2,tensor=2", "recompute": True, "zero": 2, **SHORT},
    {"layout": "shard=2,pipeline=2", "zero": 2, "micro_batch": 2, **SHORT},
    {"layout": "shard=4", "precision": "bf16", **SHORT},
    {"layout": "tensor=2,pipeline=2", "precision": "bf16", "micro_batch": 4, **SHORT},
    {"layout": "context=4", **SHORT},
    {"layout": "context=4", "documents": True, **SHORT},
    {"layout": "data=2,context=2", **SHORT},
    {"layout": "shard=2,context=2", **SHORT},
    {"layout": "tensor=2,context=2", "documents": True, **LONG},
    {"layout": "pipeline=2,context=2", "documents": True, "micro_batch": 4, **SHORT},
    {"layout": "shard=4", **RESNET},
    {"layout": "data=2,shard=2", "zero": 1, **RESNET},
]
# Three axes of more than one rank each, on eight ranks.
THREE_AXES = [
    {"layout": "data=2,tensor=2,pipeline=2", "micro_batch": 2, **SHORT},
    {"layout": "shard=2,tensor=2,context=2", "documents": True, **SHORT},
    {"layout": "data=2,shard=2,pipeline=2", "micro_batch": 1, "optimizer": "lamb", **SHORT},
]
# What a run of one process needs to have the same losses.
ALONE = ("steps", "layers", "documents", "optimizer", "learning_rate", "model", "sync_batch_norm", "precision")
TOLERANCES = {"fp32": 1e-5, "bf16": 0.02}  # the ranks round to 8 bits what one process does not round


def without_layout(settings):
    return {name: settings[name] for name in ALONE if name in settings}


def estimate(settings, num_ranks):
    """Return the estimated memory of a rank, as `plan` prints it, of a run of a GPT."""
    layout = parse_layout(settings["layout"], num_ranks)
    batch = BATCH // layout.num_data_ranks
    micro_batch = settings.get("micro_batch", batch)
    is_sharded = layout.shard * layout.context > 1 or (layout.pipeline == 1 and not layout.is_data_only)
    candidate = Candidate(
        layout,
        micro_batch,
        batch // micro_batch,
        recompute=settings.get("recompute", False),
        schedule=settings.get("pipeline_schedule", "1f1b"),
        zero=settings.get("zero", 3 if is_sharded else 0),
    )
    options = {"layers": settings.get("layers", 2), "heads": 4, "width": 32, "context": BLOCK}
    costs = count_costs("gpt", VOCABULARY, options, tokens=BLOCK)
    states = state_bytes(settings.get("optimizer", "adamw"), "fp32")
    return estimate_memory(costs, candidate, states, precision="fp32")


def differs(result, expected, settings, num_ranks):
    """Return what differs from one process, or is not divided, in the result of a layout."""
    names = ["losses", "val_loss", "ema_val_loss"]
    tolerance = TOLERANCES[settings.get("precision", "fp32")]
    wrong = [name for name in names if result[name] != pytest.approx(expected[name], abs=tolerance, rel=0)]
    num_parts = {"shard=4": 4, "data=2,shard=2": 2}.get(settings["layout"], 1)
    for name in ("parameter_bytes", "optimizer_bytes"):
        # ZeRO-1 divides only the optimizer state.
        is_whole = settings.get("zero") == 1 and name == "parameter_bytes"
        if result[name] > 1.05 / (1 if is_whole else num_parts) * expected[name]:
            wrong.append(name)
    if "model" not in settings:
        memory = estimate(settings, num_ranks)
        estimates = {"optimizer_bytes": memory.optimizer}
        if settings.get("zero") != 2:  # all are gathered in a step, and these are the bytes after one
            estimates["parameter_bytes"] = memory.parameters
        for name, estimated in estimates.items():
            if result[name] != pytest.approx(estimated, rel=0.05):
                wrong.append(f"{name}: {result[name]}, estimated {estimated}")
    return wrong


def train(launcher, num_ranks, layouts):
    # One program trains on all layouts in turn: to start four ranks takes longer than most of them.
    done = launcher.run_program(num_ranks, "layouts.py", json.dumps(layouts), timeout_s=TIMEOUT_S)
    # The launcher marks the lines with the number of the rank, unless there is one rank.
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    results = [json.loads(line) for line in lines if line.startswith("{")]
    return {json.dumps(settings): result for settings, result in zip(layouts, results, strict=True)}


@pytest.mark.slow
def test_the_loss_that_a_step_shows_is_the_same_at_every_layout(launcher):
    """snowflakedb/ArcticTraining#62, open-mmlab/mmdetection#1670, pytorch/torchtitan#550: the loss of one rank."""
    layouts = [{"layout": f"{axis}=2", **SHORT} for axis in ("data", "shard", "tensor", "context")]
    layouts += [{"layout": "pipeline=2", "micro_batch": 2, **SHORT}, {"layout": "data=2", "documents": True, **SHORT}]
    alone = train(launcher, 1, [SHORT, {**SHORT, "documents": True}])
    for text, result in train(launcher, 2, layouts).items():
        expected = alone[json.dumps({**SHORT, "documents": True} if "documents" in text else SHORT)]
        assert result["losses"] == pytest.approx(expected["losses"], abs=2e-5, rel=0), text


def test_every_layout_and_option_has_the_losses_of_one_process(launcher):
    distinct = {json.dumps(alone): alone for alone in map(without_layout, [*LAYOUTS, *THREE_AXES])}
    alone = train(launcher, 1, list(distinct.values()))
    for result in alone.values():
        if len(result["losses"]) == LONG["steps"]:
            assert result["losses"][-1] < 0.8 * result["losses"][0]
    rounded, exact = (alone[json.dumps({**SHORT, **more})]["losses"] for more in ({"precision": "bf16"}, {}))
    assert rounded != exact
    wrong = {}
    for num_ranks, layouts in ((4, LAYOUTS), (8, THREE_AXES)):
        for text, result in train(launcher, num_ranks, layouts).items():
            settings = json.loads(text)
            if found := differs(result, alone[json.dumps(without_layout(settings))], settings, num_ranks):
                wrong[text] = found
    assert not wrong


@pytest.mark.parametrize(
    ("lost", "work", "number"),
    [(0, "step", "SIGKILL"), (1, "evaluation", "SIGKILL"), (1, "step", "SIGSTOP")],
)
def test_every_rank_of_a_pipeline_reports_which_rank_is_lost(launcher, lost, work, number):
    """A stopped process keeps its connections, whose collectives wait for half an hour."""
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" not in launcher.environ
    program = launcher.program("lost_in_pipeline.py")
    done = launcher.run(3, warm_python.command(), program, "pipeline=3", lost, work, number, timeout_s=TIMEOUT_S)
    silence = ", without a sign of life for 6 s" if number == "SIGSTOP" else ""
    for rank in {0, 1, 2} - {lost}:
        assert f"rank {rank}: rank {lost} was lost, of 3{silence}: read the output there" in done.stderr
        assert f"[{rank}] after " in done.stdout
    assert (f"rank {lost} was the first to fail" in done.stderr) == (number == "SIGKILL")
