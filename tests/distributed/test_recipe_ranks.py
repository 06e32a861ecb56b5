"""The recipe at several ranks: what they compute together is what one would have computed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import datasvc
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.support import warm_python

pytestmark = pytest.mark.slow  # programs of several ranks, each of which loads torch

ROOT = Path(__file__).parents[2]
BLOCK, VOCABULARY = 16, 11


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    """A repository with 324 digits to train on and 36 held out, and 64 blocks of tokens, most of them not full."""
    repository = Repository.create(str(tmp_path_factory.mktemp("ranks") / "repo"))
    ingest(repository, str(digits_folder / "val"), "digits", val_fraction=0.1)
    random = np.random.default_rng(0)
    tokens = pa.array(random.integers(0, VOCABULARY, (64, BLOCK)).tolist(), pa.list_(pa.int32(), BLOCK))
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "train").mkdir()
    table = pa.table({"tokens": tokens, "length": pa.array(random.integers(2, BLOCK + 1, 64))})
    pq.write_table(table, folder / "train" / "blocks.parquet")
    ingest(repository, str(folder), "tokens")
    return repository


# What each rank has when it is done goes to its events.
PROGRAM = """
import hashlib, math, sys
import torch
from torch import nn
import datasvc.trainer as hvd
from datasvc.trainer.recipes import train as recipe
from datasvc.trainer.recipes.tasks import classification

def with_batch_norm(num_classes):
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))

def unlike_on_each_rank(num_classes):
    torch.manual_seed(hvd.rank())
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, num_classes))

calls, real_loss, real_end = 0, classification.Classification.sum_loss, recipe.end

def sum_loss(self, model, examples):
    global calls
    calls += 1
    loss = real_loss(self, model, examples)
    return loss * math.inf if OVERFLOWS and hvd.rank() == 1 and calls == 3 else loss

def digest(tensors):
    local = (value.to_local() if hasattr(value, "to_local") else value for value in tensors)
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in local)).hexdigest()

def end(run):
    held = digest(run.model.state_dict().values())
    average = None if run.average is None else digest(run.average.state_dict()["averages"].values())
    finite = all(value.isfinite().all().item() for value in run.model.state_dict().values())
    scale = run.loss_scale.get_scale()
    facts = {"digest": held, "average": average, "scale": scale, "finite": finite, "seed": torch.initial_seed()}
    run.events.report("held", rank=hvd.rank(), **facts)
    return real_end(run)

OVERFLOWS = sys.argv.pop(1) == "overflows"
classification.Classification.sum_loss, recipe.end = sum_loss, end
torch.set_num_threads(1)
from datasvc.trainer.__main__ import main
main()
"""


def run(repository, name, ranks, mode="plain", event_name="held", **options):
    """Run the recipe; returns what each rank held at the end, or its other events of a name, in rank order."""
    defaults = {"data": "digits", "size": "16", "scale": "0.8 1", "batch_size": "8", "resume": "never"}
    options = {**defaults, **options}
    words = [sys.executable, "-m", "datasvc.trainer.launch", "-np", str(ranks), "--no-prefix"]
    words += [warm_python.command(), "-c", PROGRAM, mode, "--repo", repository.url, "--name", name]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", *str(value).split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted((event for event in events if event["event"] == event_name), key=lambda event: event.get("rank", 0))


# At a rate where SGD is stable: where it is not, a difference in the last bit grows within fifty steps, at any size.
FIFTY_STEPS = {
    "global_batch": 48,
    "micro_batch": 20,
    "epochs": 9,
    "max_steps": 50,
    "learning_rate": 0.02,
    "clip_norm": 5,
    "ema_decay": 0.9,
}


@pytest.fixture(scope="module")
def alone(repository):
    run(repository, "alone", 1, **FIFTY_STEPS)
    return datasvc.open(repository.url).models.restore("alone")


@pytest.mark.parametrize("ranks", [3, 4])
def test_at_one_global_batch_any_number_of_ranks_gives_the_same_weights_and_metrics(repository, alone, ranks):
    held = run(repository, f"by-{ranks}", ranks, **FIFTY_STEPS)
    assert len({each["digest"] for each in held}) == 1, "all ranks hold the same bits"
    assert len({each["seed"] for each in held}) == ranks, "but none draws another's dropout masks"
    together = datasvc.open(repository.url).models.restore(f"by-{ranks}")
    assert together.state["step"] == alone.state["step"] == 50
    for tree in ("model", "ema"):
        theirs, ours = together.state[tree], alone.state[tree]
        theirs, ours = theirs.get("averages", theirs), ours.get("averages", ours)
        for name, value in ours.items():
            torch.testing.assert_close(theirs[name], value, atol=1e-5, rtol=0)
    assert together.entry["metrics"].keys() >= {"val_accuracy", "val_top5", "val_loss", "ema_val_loss"}
    assert together.entry["metrics"] == pytest.approx(alone.entry["metrics"], abs=1e-5)


def test_with_synchronised_batch_norm_a_resnet_has_the_same_weights_at_any_number_of_ranks(repository):
    options = {"model": "resnet18", "model_option": "small_input=true", "max_steps": 4}
    options |= {"learning_rate": 0.02, "warmup_epochs": 0, "sync_batch_norm": "", "global_batch": 64}
    options |= {"statistics": "recompute", "statistics_batches": 1, "size": 8, "codec": "none"}
    for ranks in (1, 2, 4):
        run(repository, f"synchronised-{ranks}", ranks, **options)
    models = datasvc.open(repository.url).models
    ours, *others = (models.restore(f"synchronised-{ranks}").state for ranks in (1, 2, 4))
    for theirs in others:
        for name, value in ours["model"].items():
            # Variances are up to 3. They sum squares, so they differ more than the weights do.
            tolerance = 1e-3 if name.endswith("running_var") else 1e-4
            torch.testing.assert_close(theirs["model"][name], value, atol=tolerance, rtol=0)
    # The statistics of each rank's own samples, in contrast, make other weights.
    run(repository, "not-synchronised", 2, **{key: options[key] for key in options if key != "sync_batch_norm"})
    local = models.restore("not-synchronised").state["model"]
    assert (local["stem.0.weight"] - ours["model"]["stem.0.weight"]).abs().max() > 1e-4


def test_ranks_that_make_unlike_weights_begin_with_those_of_the_first_and_so_does_their_average(repository):
    held = run(repository, "unlike", 2, model="__main__:unlike_on_each_rank", ema_decay=0.9, max_steps=1)
    assert held[0]["digest"] == held[1]["digest"]
    assert held[0]["average"] == held[1]["average"]


def test_ranks_skip_a_step_together_when_one_overflows_and_share_their_batch_statistics(repository):
    held = run(
        repository, "overflowed", 2, "overflows", model="__main__:with_batch_norm", precision="fp16", max_steps=5
    )
    assert [each["scale"] for each in held] == [2.0**15, 2.0**15]  # once half of torch's first scale
    assert all(each["finite"] for each in held)
    assert held[0]["digest"] == held[1]["digest"]


def test_gradients_that_travel_in_16_bits_are_rounded_and_alike_on_all_ranks(repository):
    weights = {}
    for compression in ("none", "bf16"):
        held = run(repository, f"sent-{compression}", 2, compression=compression, max_steps=4, learning_rate=0.02)
        assert held[0]["digest"] == held[1]["digest"]
        weights[compression] = datasvc.open(repository.url).models.restore(f"sent-{compression}").state["model"]
    pairs = [(value, weights["bf16"][name]) for name, value in weights["none"].items()]
    assert any(not torch.equal(exact, rounded) for exact, rounded in pairs)
    for exact, rounded in pairs:
        torch.testing.assert_close(rounded, exact, atol=0.02, rtol=0.05)


def test_the_size_of_buckets_is_chosen_once_and_reported_with_what_an_all_reduce_takes(repository):
    (chosen,) = run(repository, "buckets", 2, event_name="buckets", bucket="auto", max_steps=9)
    assert chosen["step"] == 7
    assert chosen["bucket_bytes"] > 0
    assert min(chosen["all_reduce_s"], chosen["s_per_byte"]) >= 0


def test_tokens_count_alike_on_ranks_with_different_numbers_of_them(repository):
    """Goyal et al. 2017, remark 3, over ranks: blocks are cut short, so no two ranks have equally many targets."""
    options = {"data": "tokens", "vocabulary": VOCABULARY, "optimizer": "adamw", "learning_rate": 0.001, "epochs": 2}
    options |= {"model_option": f"layers=1 heads=2 width=32 dropout=0.0 context={BLOCK}", "global_batch": 16}
    run(repository, "gpt-alone", 1, **options)
    run(repository, "gpt-together", 2, **options)
    ours, theirs = (datasvc.open(repository.url).models.restore(f"gpt-{name}") for name in ("alone", "together"))
    for name, value in ours.state["model"].items():
        torch.testing.assert_close(theirs.state["model"][name], value, atol=1e-5, rtol=0)


SIGNAL = {"signals": "loss", "epochs": 2, "evaluate_every": 2, "learning_rate": 0.02}


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_losses_of_the_samples_are_those_of_one_rank(repository, ranks):
    repo = datasvc.open(repository.url)
    split = repo.dataset("digits")["train"]
    for size in (1, ranks):
        run(repository, f"signal-{size}", size, global_batch=48, micro_batch=20, **SIGNAL)
    alone, together = (repo.runs.signal(f"signal-{size}", split, reduce="mean") for size in (1, ranks))
    np.testing.assert_array_equal(np.isnan(together), np.isnan(alone))
    np.testing.assert_allclose(together, alone, rtol=4e-3)  # of half precision, whose last digit may differ


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2", "data=2"])
def test_the_losses_of_blocks_are_recorded_once_by_the_ranks_that_have_the_outputs(repository, layout):
    repo = datasvc.open(repository.url)
    split = repo.dataset("tokens")["train"]
    options = {"data": "tokens", "vocabulary": VOCABULARY, "optimizer": "adamw", **SIGNAL, "learning_rate": 0.001}
    options |= {"global_batch": 16, "micro_batch": 4}
    options |= {"model_option": f"layers=2 heads=2 width=16 dropout=0.0 context={BLOCK}"}
    run(repository, "blocks", 1, **options)
    run(repository, layout.replace("=", "-"), 2, layout=layout, **options)
    alone, divided = (repo.runs.signal(name, split) for name in ("blocks", layout.replace("=", "-")))
    assert np.isfinite(divided).all()
    np.testing.assert_allclose(divided, alone, rtol=4e-3)
