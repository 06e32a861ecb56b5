"""The loop in a world of one, in this process: what survives a restore, when it ends, and what it says."""

import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import threading
import types
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import datasvc
import datasvc.trainer as hvd
from datasvc.errors import ConfigError, NotFoundError, StateMismatchError, UnavailableError
from datasvc.models import describe_model, model_log
from datasvc.models.registry.retention import remove
from datasvc.models.restoring.restore import read_version
from datasvc.repository import Repository
from datasvc.repository.objects.objects import Objects
from datasvc.runs import list_runs, read_run
from datasvc.shards import ingest, open_dataset
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.checkpoints import restore
from datasvc.trainer.recipes.reporting.recorder import Recorder
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import report_step, train
from tests.support.gate import Gate
from tests.support.terminals import read_terminal

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, VOCABULARY = 16, 11


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    """A repository with 324 digits to train on and 36 held out, and token blocks."""
    repository = Repository.create(str(tmp_path_factory.mktemp("train") / "repo"))
    ingest(repository, str(digits_folder / "val"), "digits", val_fraction=0.1)
    ingest(repository, write_tokens(tmp_path_factory.mktemp("tokens")), "tokens")
    return repository


def write_tokens(folder):
    """Sequences in which each token follows from the one before, so that a model can learn them."""
    for split, seed, num_blocks in (("train", 0, 64), ("val", 1, 10)):
        starts = np.random.default_rng(seed).integers(0, VOCABULARY, num_blocks)
        blocks = (starts[:, None] + 3 * np.arange(BLOCK)[None]) % VOCABULARY
        (folder / split).mkdir()
        column = pa.array(blocks.tolist(), pa.list_(pa.int32(), BLOCK))
        pq.write_table(pa.table({"tokens": column}), folder / split / "blocks.parquet")
    return str(folder)


def run(repository, name, capsys=None, **settings):
    """Train on digits unless told otherwise; returns the events where they are captured."""
    defaults = {"data": "digits", "size": 16, "scale": (0.8, 1.0), "flip": 0.0, "batch_size": 32, "epochs": 1}
    train(TrainConfig(repo=repository.url, name=name, **{**defaults, **settings}))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()] if capsys else None


def state_of(repository, ref):
    return datasvc.open(repository.url).models.restore(ref).state


def equal_weights(repository, a, b):
    return describe_model(repository, a).entry["content"] == describe_model(repository, b).entry["content"]


@pytest.mark.parametrize(("op", "uses_its_own"), [("average", False), ("adasum", True)])
def test_only_a_run_that_combines_steps_restores_the_moments_of_its_own_rank(
    repository, monkeypatch, op, uses_its_own
):
    def restore_with_moments_of_this_rank(*arguments, **options):
        checkpoint = restore(*arguments, **options)
        checkpoint.state["rank_state"][0]["optimizer"] = {}
        return checkpoint

    run(repository, f"whole-{op}", op=op, max_steps=6)
    run(repository, f"halves-{op}", op=op, max_steps=3)
    monkeypatch.setattr("datasvc.trainer.recipes.start.restore", restore_with_moments_of_this_rank)
    run(repository, f"halves-{op}", op=op, max_steps=6)
    assert equal_weights(repository, f"whole-{op}", f"halves-{op}") is not uses_its_own


MIXED = {"precision": "fp16", "ema_decay": 0.9, "optimizer": "lamb", "learning_rate": 0.01, "clip_norm": 1.0}


@pytest.mark.slow
def test_mixed_precision_average_and_optimizer_survive_a_restore(repository):
    """The loss scale grows every other step here, so a run that forgot it would end elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.trainer.recipes.build.make_loss_scale", small_growing_scale)
        run(repository, "mixed", max_steps=8, **MIXED)
        run(repository, "mixed-resumed", max_steps=5, **MIXED)
        halfway = state_of(repository, "mixed-resumed")["loss_scale"]
        assert halfway["scale"] == 1024.0 * 2**2
        assert halfway["_growth_tracker"] == 1
        run(repository, "mixed-resumed", max_steps=8, **MIXED)
    assert state_of(repository, "mixed")["loss_scale"]["scale"] == 1024.0 * 2**4
    assert state_of(repository, "mixed")["ema"]["num_updates"] == 8
    assert equal_weights(repository, "mixed", "mixed-resumed")


@pytest.mark.slow
def test_a_run_resumed_from_the_last_step_of_an_epoch_evaluates_that_epoch_once(repository, capsys):
    settings = {"epochs": 2, "evaluate_every": 1}
    run(repository, "uninterrupted", **settings)
    run(repository, "between-epochs", capsys, max_steps=10, **settings)
    assert state_of(repository, "between-epochs")["loader"]["position"] == 320
    events = run(repository, "between-epochs", capsys, **settings)
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert [(event["step"], event["epoch"]) for event in evaluations] == [(10, 1), (20, 2)]
    assert equal_weights(repository, "uninterrupted", "between-epochs")


def test_a_run_on_a_gpu_that_is_not_there_says_what_to_do(repository, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is 'cuda:0', and torch finds no GPUs here"):
        run(repository, "on-gpu", device="cuda")


def test_a_windowed_run_needs_no_numbers_and_resumes_with_those_it_began_with(repository, tmp_path):
    windowed = {"shuffle": "windowed", "cache": str(tmp_path / "cache"), "cache_budget": "50MB"}
    run(repository, "windowed", max_steps=6, **windowed)
    run(repository, "windowed-resumed", max_steps=3, **windowed)
    numbers = state_of(repository, "windowed-resumed")["loader"]
    run(repository, "windowed-resumed", max_steps=6, shuffle="windowed")  # without a cache
    assert numbers["shuffle"] == "windowed"
    assert state_of(repository, "windowed-resumed")["loader"]["block"] == numbers["block"]
    assert equal_weights(repository, "windowed", "windowed-resumed")


def small_growing_scale(precision, device):
    return torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2, enabled=precision == "fp16")


def test_a_gradient_that_overflows_halves_the_loss_scale_and_skips_the_step(repository):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "datasvc.trainer.recipes.build.make_loss_scale",
            lambda precision, device: torch.amp.GradScaler(device.type, init_scale=2.0**40),
        )
        run(repository, "overflow", max_steps=1, precision="fp16", ema_decay=0.5)
        run(repository, "untrained", max_steps=1, learning_rate=0.0, precision="fp16")
    state, untrained = state_of(repository, "overflow"), state_of(repository, "untrained")
    assert state["loss_scale"]["scale"] == 2.0**39
    assert all(torch.equal(state["model"][name], value) for name, value in untrained["model"].items())
    assert state["ema"]["num_updates"] == 0


def test_a_run_resumed_at_another_number_of_ranks_draws_what_it_has_not_drawn_yet(repository):
    run(repository, "as-one", max_steps=2)
    state = state_of(repository, "as-one")
    datasvc.open(repository.url).models.save("as-two", {**state, "rank_state": state["rank_state"] * 2}, step=2)
    run(repository, "as-two", max_steps=3)
    assert torch.initial_seed() == random_state.seed_of_rank(0, 0, step=2)


def test_a_run_of_one_step_learns_at_the_whole_rate(repository, capsys):
    settings = {"batch_size": 324, "epochs": 1, "warmup_epochs": 0.0, "learning_rate": 0.25}
    events = run(repository, "at-a-stroke", capsys, **settings)
    assert [event["rate"] for event in events if event["event"] == "step"] == [0.25]


def test_accumulating_over_backward_passes_gives_the_weights_of_one(repository):
    run(repository, "at-once", max_steps=8, learning_rate=0.02)
    run(repository, "in-parts", max_steps=8, learning_rate=0.02, micro_batch=12)
    at_once, in_parts = state_of(repository, "at-once")["model"], state_of(repository, "in-parts")["model"]
    for name, value in at_once.items():
        torch.testing.assert_close(in_parts[name], value, atol=1e-5, rtol=0)


def test_every_setting_of_the_run_is_in_its_checkpoints(repository):
    run(repository, "configured", max_steps=1, label_smoothing=0.1, channels_last=True, compile="eager")
    config = describe_model(repository, "configured").entry["config"]
    assert list(config) == sorted(field.name for field in dataclasses.fields(TrainConfig))
    assert (config["model"], config["label_smoothing"], config["compile"]) == ("small-cnn", 0.1, "eager")


def test_channels_last_and_compilation_change_nothing_but_the_way_there(repository):
    run(repository, "plain", max_steps=5, learning_rate=0.02)
    run(repository, "compiled", max_steps=5, learning_rate=0.02, channels_last=True, compile="eager")
    plain, compiled = state_of(repository, "plain")["model"], state_of(repository, "compiled")["model"]
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="compile is 'no-such-backend'"):
        run(repository, "uncompiled", max_steps=1, compile="no-such-backend")


def test_a_run_that_learns_nothing_more_ends_early_and_stays_ended(repository, capsys):
    settings = {"epochs": 9, "evaluate_every": 1, "patience": 2, "learning_rate": 0.0, "batch_size": 160}
    events = run(repository, "stopped", capsys, **settings)
    assert [event["epoch"] for event in events if event["event"] == "evaluation"] == [1, 2, 3]
    assert len(model_log(repository, "stopped")) == 3
    again = run(repository, "stopped", capsys, **settings)
    assert [event["event"] for event in again] == ["start", "restored", "end"]
    assert again[-1]["val_loss"] == events[-1]["val_loss"]
    run(repository, "stopped", **settings)
    assert capsys.readouterr().err.endswith("to continue it, raise --patience\n")


def test_a_run_continues_the_version_that_it_is_told_to(repository):
    run(repository, "trunk", max_steps=4, checkpoint_every=2)
    run(repository, "branch", max_steps=4, resume="trunk@1")
    assert describe_model(repository, "branch").entry["parent"] == "trunk@1"
    assert equal_weights(repository, "branch", "trunk")
    run(repository, "trunk", max_steps=1, resume="never")
    assert describe_model(repository, "trunk").entry["parent"] is None
    with pytest.raises(NotFoundError):
        run(repository, "branch", resume="trunk@99")


def test_a_new_run_starts_with_the_weights_of_a_version_and_records_it(repository, few, capsys):
    run(repository, "base", max_steps=2)
    tuning = {"data": few, "init_from": "base@1", "learning_rate": 0.0, "weight_decay": 0.0, "ema_decay": 0.9}
    with pytest.raises(ConfigError, match=r"base@1 does not fit(?s:.*)\[3(?s:.*)--init-exclude ") as refused:
        run(repository, "tuned", **tuning)
    (head,) = str(refused.value).rpartition("--init-exclude ")[2].split()
    run(repository, "tuned", capsys, max_steps=1, init_exclude=(head,), **tuning)
    assert describe_model(repository, "tuned").entry["parent"] == "base@1"
    base, tuned = state_of(repository, "base"), state_of(repository, "tuned")
    names = [name for name in parameters_of(base) if not name.startswith(head)]
    assert names
    assert all(torch.equal(base["model"][name], tuned["model"][name]) for name in names)
    assert all(torch.allclose(base["model"][name], tuned["ema"]["averages"][name]) for name in names)
    assert tuned["loader"]["epoch"] == 0
    # Started again, the run continues its own checkpoint.
    events = run(repository, "tuned", capsys, max_steps=2, init_exclude=(head,), **tuning)
    assert [event["version"] for event in restored(events)] == ["tuned@1"]
    assert describe_model(repository, "tuned").entry["parent"] == "tuned@1"
    with pytest.raises(ConfigError, match="no tensor matches 'tail'"):
        run(repository, "tuned-without", init_exclude=("tail",), **tuning)


def test_a_new_run_starts_with_a_version_whose_tensors_are_those_of_the_model_alone(repository):
    run(repository, "whole", max_steps=1)
    weights = state_of(repository, "whole")["model"]
    models = datasvc.open(repository.url).models
    # Of another dtype, without loss of precision.
    doubles = {name: value.double() if value.is_floating_point() else value for name, value in weights.items()}
    models.save("bare", doubles, step=0)
    run(repository, "from-bare", max_steps=1, learning_rate=0.0, weight_decay=0.0, init_from="bare")
    after = state_of(repository, "from-bare")["model"]
    assert all(torch.equal(weights[name], after[name]) for name in parameters_of({"model": weights}))
    assert describe_model(repository, "from-bare").entry["parent"] == "bare@1"
    models.save("alien", {"other": torch.zeros(3)}, step=0)
    with pytest.raises(ConfigError, match="alien@1 has no weights for the model 'small-cnn'"):
        run(repository, "from-alien", init_from="alien@1")


@pytest.fixture(scope="module")
def few(repository, digits_folder, tmp_path_factory):
    """A data set of three classes of digits, without a validation split."""
    folder = tmp_path_factory.mktemp("few")
    for name in ("0", "1", "2"):
        shutil.copytree(digits_folder / "val" / name, folder / "train" / name)
    ingest(repository, str(folder), "few")
    return "few"


def parameters_of(state):
    """The names of the weights, without the statistics that a forward pass changes."""
    return [name for name in state["model"] if not re.search("running_|num_batches", name)]


def test_a_checkpoint_of_other_data_is_refused_by_the_names_of_the_versions(repository, few):
    run(repository, "on-digits", max_steps=1)
    with pytest.raises(StateMismatchError, match=r"on-digits@1 was trained on digits@1, this run reads few@1; give"):
        run(repository, "on-digits", max_steps=2, data=few, size=16)


def test_early_stop_without_a_validation_split_is_refused_before_the_first_step(repository, few, capsys):
    with pytest.raises(ConfigError, match="few@1 has no split 'val' to evaluate; ingest the data with one"):
        run(repository, "never-stops", data=few, evaluate_every=1, patience=2)
    assert '"step"' not in capsys.readouterr().out


@pytest.mark.parametrize(("max_steps", "epochs"), [(3, [0]), (13, [0, 1]), (22, [0, 1, 2])])
def test_a_profile_names_its_epoch_also_if_steps_end_the_run_within_it(
    repository, tmp_path, capsys, max_steps, epochs
):
    """Ten steps are an epoch."""
    name = f"profiled-{max_steps}"
    events = run(repository, name, capsys, epochs=3, max_steps=max_steps, profile=str(tmp_path / "trace.json"))
    profiles = [event for event in events if event["event"] == "profile"]
    assert [event["epoch"] for event in profiles] == epochs


@pytest.mark.parametrize(
    "step", ["start.build_learner", "start.Cache", "start.ConsumptionTracker", "start.open_checkpoints"]
)
def test_the_servers_of_the_nodes_end_if_a_later_step_of_the_start_fails(repository, tmp_path, monkeypatch, step):
    """The servers need a job of several ranks; here a stand-in says whether it was closed."""
    closed = []
    nodes = types.SimpleNamespace(peers=None, close=lambda: closed.append(True))
    monkeypatch.setattr("datasvc.trainer.recipes.start.RankNodes", lambda *_, **__: nodes)

    def fail(*_, **__):
        raise UnavailableError("the later step fails")

    monkeypatch.setattr(f"datasvc.trainer.recipes.{step}", fail)
    with pytest.raises(UnavailableError, match="later step"):
        run(repository, "not-started", cache=str(tmp_path / "cache"), cache_budget="50MB", peers="ranks")
    assert closed == [True]


def test_an_empty_cache_is_none(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(repository, "uncached", max_steps=1, cache="")
    assert not list(tmp_path.iterdir())


def test_a_finished_run_says_that_nothing_is_left_and_which_limits_it_has_reached(repository, capsys):
    def said(**settings):
        capsys.readouterr()
        run(repository, "finished", batch_size=160, **settings)
        return capsys.readouterr().err

    assert said(max_steps=1) == ""
    assert said(max_steps=1) == (
        "nothing is left to train: finished@1 is complete, at step 1; to continue it, raise --max-steps\n"
    )
    assert said(max_steps=2) == ""
    assert said(max_steps=2).endswith("raise --epochs and --max-steps\n")
    assert said(max_steps=9, patience=1, evaluate_every=1).endswith("raise --epochs\n")


def test_a_run_comes_back_through_its_cache_and_says_how_long_it_took_and_whence(repository, tmp_path, capsys):
    settings = {"batch_size": 160, "cache": str(tmp_path / "cache"), "cache_budget": "50MB", "codec": "none"}
    assert not restored(run(repository, "cached", capsys, max_steps=1, **settings))
    (first,) = restored(run(repository, "cached", capsys, max_steps=2, **settings))
    assert (first["version"], first["rank"], first.keys() - {"origin_bytes"}) == (
        "cached@1",
        0,
        {"event", "rank", "version", "seconds", "size_bytes", "lost_steps"},
    )
    # What is stored raw and not packed has the size of its tensors.
    assert 0 < first["origin_bytes"] <= first["size_bytes"]
    again = restored(run(repository, "branch-of-cached", capsys, max_steps=1, resume="cached@1", **settings))
    assert again[0]["resident_bytes"] == first["origin_bytes"]
    (record, *_) = read_version(repository, "cached@2").records
    assert {link.encoding for piece in record.chunks for link in piece.chain} == {"raw"}


def test_who_sits_at_a_terminal_sees_a_restore_come(repository, monkeypatch):
    run(repository, "seen", max_steps=1)
    leader, follower = os.openpty()
    with open(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        run(repository, "seen", max_steps=2)
    assert "restoring seen@1" in read_terminal(leader)


def restored(events):
    return [event for event in events if event["event"] == "restored"]


def test_a_run_whose_versions_were_all_removed_starts_anew(repository, capsys):
    run(repository, "removed", max_steps=1)
    remove(repository, ["removed@1"])
    capsys.readouterr()
    events = run(repository, "removed", capsys, max_steps=1)
    assert [(event["event"], event["version"]) for event in events[-2:]] == [
        ("checkpoint", "removed@2"),
        ("end", "removed@2"),
    ]
    assert describe_model(repository, "removed").entry["parent"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "lamb"}, "optimizer 'sgd', this run has 'lamb'"),
        ({"model": "alexnet", "size": 64}, "model 'small-cnn', this run has 'alexnet'"),
        ({"decayed": "all"}, "does not fit this run's optimizer"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(repository, change, message):
    if not repository.versions("models", "plainly").head():
        run(repository, "plainly", max_steps=1)
    with pytest.raises(ConfigError, match=message):
        run(repository, "plainly", **change)


@pytest.mark.parametrize("change", ["layers=2", "heads=4", "width=64"])
def test_a_version_of_another_architecture_is_neither_continued_nor_taken_for_its_weights(repository, change):
    settings = {"data": "tokens", "vocabulary": VOCABULARY, "optimizer": "adamw", "max_steps": 1}
    sizes = {"layers": 1, "heads": 2, "width": 32}
    options = [f"{name}={size}" for name, size in sizes.items()]
    if not repository.versions("models", "shaped").head():
        run(repository, "shaped", model_option=(*options, f"context={BLOCK}"), **settings)
    entry = describe_model(repository, "shaped").entry
    assert entry["config"]["model_sizes"] == sizes
    name, _, size = change.partition("=")
    other = (*options, change, f"context={BLOCK}")
    message = (
        f"shaped@1 has a model with layers=1, heads=2, width=32, .*{change}.*--model-option {name}={sizes[name]}"
    )
    with pytest.raises(ConfigError, match=message):
        run(repository, "shaped", model_option=other, **settings | {"max_steps": 2})
    starting = {**settings, "model_option": other, "init_from": "shaped@1"}
    # Another number of layers is seen in the tensors, and may be wanted.
    message = "shaped@1 does not fit" if name == "layers" else message
    with pytest.raises(ConfigError, match=message):
        run(repository, f"from-shaped-{size}", **starting)
    if name == "layers":
        run(repository, "deeper", init_exclude=("blocks.1",), **starting)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "context=3", "vocabulary": VOCABULARY}, f"a block has {BLOCK} tokens; context may be 1, 2, 4"),
        ({"layout": "tensor=3"}, "holds tokens: set the size of its vocabulary, such as --vocabulary 50257"),
        ({"recompute": True}, "holds tokens: set the size of its vocabulary"),
    ],
)
def test_data_that_a_setting_cannot_have_are_refused_before_the_ranks_connect(
    repository, capsys, monkeypatch, settings, message
):
    def connect():
        raise AssertionError("the ranks connect")

    monkeypatch.setattr(hvd, "init", connect)
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match=message):
        run(repository, "impossible", data="tokens", **settings)
    assert '"start"' not in capsys.readouterr().out


def test_another_kind_of_evaluation_than_that_of_the_checkpoint_is_a_warning(repository, caplog):
    run(repository, "evaluated", max_steps=1, evaluation="window")
    assert describe_model(repository, "evaluated").entry["config"]["evaluation"] == "window"
    run(repository, "evaluated", max_steps=2, evaluation="window")
    assert "accuracies" not in caplog.text
    run(repository, "evaluated", max_steps=3)
    assert "was evaluated with --evaluation window, this run has torchvision, so accuracies" in caplog.text


def test_settings_of_the_optimizer_are_this_run_s_and_not_the_checkpoint_s(repository):
    run(repository, "lightly", max_steps=1, weight_decay=0.0)
    run(repository, "lightly", max_steps=2, weight_decay=0.3, momentum=0.5)
    group = state_of(repository, "lightly")["optimizer"]["param_groups"][0]
    assert (group["weight_decay"], group["momentum"]) == (0.3, 0.5)


@pytest.mark.parametrize("optimizer", ["lars", "lamb", "adamw", "rmsprop-sgd"])
def test_every_optimizer_trains_and_resumes(repository, optimizer):
    settings = {"optimizer": optimizer, "learning_rate": 0.01, "trust_coefficient": 0.1}
    run(repository, f"whole-{optimizer}", max_steps=4, **settings)
    run(repository, f"parts-{optimizer}", max_steps=2, **settings)
    run(repository, f"parts-{optimizer}", max_steps=4, **settings)
    assert equal_weights(repository, f"whole-{optimizer}", f"parts-{optimizer}")


def test_a_gpt_learns_tokens_by_the_same_loop(repository, capsys):
    options = ("layers=1", "heads=2", "width=32", "dropout=0.0", f"context={BLOCK}")
    settings = {"data": "tokens", "vocabulary": VOCABULARY, "model_option": options, "optimizer": "adamw"}
    settings |= {"learning_rate": 0.01, "batch_size": 16, "epochs": 30, "weight_decay": 0.0}
    events = run(repository, "gpt", capsys, **settings)
    assert events[-1]["val_loss"] < 0.5 < np.log(VOCABULARY) < events[1]["loss"] + 0.5
    assert events[-1]["val_perplexity"] == pytest.approx(np.exp(events[-1]["val_loss"]))
    assert events[-1]["val_accuracy"] > 0.9
    assert events[1]["unit"] == "blocks"
    with pytest.raises(ConfigError, match="--vocabulary"):
        run(repository, "gpt", data="tokens")
    with pytest.raises(ConfigError, match="token 10; --vocabulary is 10"):
        run(repository, "small", **{**settings, "vocabulary": 10})


@pytest.mark.slow
def test_a_model_with_auxiliary_classifiers_trains_and_batch_statistics_are_kept(repository):
    run(repository, "googlenet", model="googlenet", model_option=(), size=64, batch_size=8, max_steps=1)
    run(repository, "resnet", model="resnet18", model_option=("small_input=true",), batch_size=16, max_steps=2)
    assert state_of(repository, "resnet")["model"]["stem.1.running_mean"].abs().sum() > 0


def test_numbers_go_to_the_logs_that_a_run_names(repository, tmp_path, monkeypatch):
    taken = []

    class Log:
        run_id = None

        def __init__(self, place, name, config, step, _run_id):
            taken.append((place, name, config["epochs"], step))

        def log(self, step, values):
            taken.append((step, sorted(values)))

        def close(self):
            taken.append("closed")

    monkeypatch.setattr("datasvc.trainer.recipes.reporting.metric_logs._KINDS", {"tensorboard": Log})
    run(repository, "logged", batch_size=160, epochs=1, report_every=2, log_to=(f"tensorboard:{tmp_path}",))
    assert taken == [
        (str(tmp_path), "logged", 1, 0),
        (2, ["data_stall", "images_per_s", "loss", "rate"]),
        (2, ["val_accuracy", "val_loss", "val_top5"]),
        "closed",
    ]


@pytest.mark.slow
def test_a_run_that_starts_again_continues_its_run_of_each_tracker_and_a_branch_begins_one(repository, monkeypatch):
    opened = []

    class Log:
        def __init__(self, place, name, _config, step, run_id):
            opened.append((place, name, step, run_id))
            self.run_id = run_id or f"{place}-{len(opened)}"

        def log(self, step, values):
            pass

        def close(self):
            pass

    monkeypatch.setattr("datasvc.trainer.recipes.reporting.metric_logs._KINDS", {"wandb": Log, "mlflow": Log})
    run(repository, "tracked", max_steps=1, log_to=("wandb:p",))
    run(repository, "tracked", max_steps=2, log_to=("wandb:p", "mlflow:e"))
    run(repository, "tracked", max_steps=3)
    run(repository, "tracked", max_steps=4, log_to=("mlflow:e", "wandb:p"))
    run(repository, "tracked-branch", max_steps=5, log_to=("wandb:p",), resume="tracked@4")
    assert opened == [
        ("p", "tracked", 0, None),
        ("p", "tracked", 1, "p-1"),
        ("e", "tracked", 1, None),
        ("e", "tracked", 3, "e-3"),
        ("p", "tracked", 3, "p-1"),
        ("p", "tracked-branch", 4, None),
    ]
    configs = [describe_model(repository, f"tracked@{number}").entry["config"] for number in range(1, 5)]
    assert [config.get("wandb_run") for config in configs] == ["p-1"] * 4
    assert [config.get("mlflow_run") for config in configs] == [None, "e-3", "e-3", "e-3"]


@pytest.mark.slow
def test_a_run_and_its_versions_name_each_other_and_a_restart_continues_the_run(repository):
    settings = {"epochs": 2, "evaluate_every": 1, "checkpoint_every": 4}
    run(repository, "recorded", max_steps=13, **settings)
    run(repository, "recorded", **settings)
    (found,) = list_runs(repository, "recorded")
    history = read_run(repository, "recorded", found.id)
    versions = [f"recorded@{version.version}" for version in model_log(repository, "recorded")]
    assert [describe_model(repository, version).entry["run"] for version in versions] == [found.ref] * len(versions)
    assert sorted(history.versions) == sorted(versions)
    assert (found.state, found.step, found.num_attempts, found.data) == ("finished", 20, 2, ["digits@1"])
    assert history.series["loss"].steps.tolist() == [*range(1, 21)]
    assert {"rate", "step_s", "wait_s", "images_per_s", "forward_s", "backward_s", "coverage"} <= set(history.series)
    assert history.evaluation["val_accuracy"].steps.tolist() == [10, 13, 20]
    assert [header["world_size"] for header in history.headers.values()] == [1, 1]
    assert history.header["config"]["name"] == "recorded"
    assert describe_model(repository, history.header["parent"]).entry["step"] == 13
    diagnoses = [event.facts["verdict"] for event in history.events if event.event == "diagnosis"]
    assert all("images/s" in verdict for verdict in diagnoses)
    assert [event.event for event in history.events if event.event in ("start", "end")] == ["start", "end"] * 2
    assert not history.problems


def test_another_name_begins_another_run_and_without_a_log_there_is_none(repository):
    run(repository, "recorded-once", max_steps=2)
    run(repository, "recorded-branch", max_steps=3, resume="recorded-once@1")
    run(repository, "unrecorded", max_steps=2, run_log=False)
    (branch,) = list_runs(repository, "recorded-branch")
    assert read_run(repository, branch.name, branch.id).header["parent"] == "recorded-once@1"
    assert list_runs(repository, "unrecorded") == []
    assert "run" not in describe_model(repository, "unrecorded@1").entry


def test_the_log_says_that_a_run_evaluates_or_saves(repository, monkeypatch):
    seen = []

    @contextmanager
    def note(recorder, work, busy=Recorder.busy):
        def state():
            assert recorder.log.flush()
            (found,) = list_runs(repository, "busy")
            return found.busy

        with busy(recorder, work):
            seen.append((work, state()))
            yield
        assert state() == ""

    monkeypatch.setattr(Recorder, "busy", note)
    run(repository, "busy", max_steps=2)
    assert seen == [("evaluation", "evaluation"), ("checkpoint", "checkpoint")]
    (found,) = list_runs(repository, "busy")
    assert (found.busy, found.is_stalled) == ("", False)


def test_a_run_that_fails_says_so_in_its_log(repository, monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("datasvc.trainer.recipes.train.update", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(repository, "failing")
    (found,) = list_runs(repository, "failing")
    assert (found.state, found.message) == ("failed", "RuntimeError: out of memory")


def test_a_tracker_that_cannot_start_is_the_error_of_the_run_s_log(repository, monkeypatch):
    def fail(*_arguments, **_options):
        raise ConfigError("the tracker refuses the key")

    monkeypatch.setattr("datasvc.trainer.recipes.start.open_logs", fail)
    with pytest.raises(ConfigError, match="refuses the key"):
        run(repository, "untracked", log_to=("wandb:project",))
    (found,) = list_runs(repository, "untracked")
    assert (found.state, found.message) == ("failed", "ConfigError: the tracker refuses the key")


def test_a_signal_ends_the_run_with_a_last_checkpoint_and_the_rest_gives_the_same_bits(
    repository, capsys, monkeypatch
):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    options = ("layers=1", "heads=2", "width=32", "dropout=0.1", f"context={BLOCK}")
    settings = {"data": "tokens", "vocabulary": VOCABULARY, "model_option": options, "batch_size": 16, "epochs": 2}
    run(repository, "undisturbed", **settings)

    def report_step(run, **facts):
        if run.step == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("datasvc.trainer.recipes.train.report_step", report_step)
    try:
        with pytest.raises(SystemExit) as ended:
            run(repository, "preempted", **settings)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"event": "stopped", "version": "preempted@1", "step": 3, "signal": signal.SIGTERM}
    assert [(run.state, run.message) for run in list_runs(repository, "preempted")] == [
        ("interrupted", f"stopped by signal {int(signal.SIGTERM)}")
    ]
    monkeypatch.undo()
    run(repository, "preempted", **settings)
    assert equal_weights(repository, "preempted", "undisturbed")
    assert describe_model(repository, "preempted").entry["parent"] == "preempted@1"


def test_a_checkpoint_may_be_left_out_where_an_earlier_one_is_still_being_written(repository, capsys, monkeypatch):
    gate = Gate()

    def report_step(run, **facts):
        if run.step == 5:
            gate.open()

    monkeypatch.setattr(Objects, "write", gate.before(Objects.write))
    monkeypatch.setattr("datasvc.trainer.recipes.train.report_step", report_step)
    # A seed of its own: what another test has stored already would not be written, and nothing held back.
    settings = {"max_steps": 5, "checkpoint_every": 2, "checkpoint_overlap": "refuse", "seed": 5}
    events = run(repository, "refusing", capsys, **settings)
    assert [(event["event"], event["step"]) for event in events if event["event"] in {"checkpoint", "refused"}] == [
        ("refused", 4),
        ("checkpoint", 2),
        ("checkpoint", 5),
    ]


def test_a_round_of_which_nothing_was_left_reports_no_samples(repository, capsys, monkeypatch):
    def report(run, **facts):
        report_step(run, **{**facts, "samples": 0.0})

    monkeypatch.setattr("datasvc.trainer.recipes.train.report_step", report)
    events = run(repository, "nothing-left", capsys, max_steps=1)
    assert [event["samples"] for event in events if event["event"] == "step"] == [0]


def test_a_run_goes_on_after_a_checkpoint_that_failed_and_says_so(repository, capsys, monkeypatch):
    real_write = Objects.write

    def write(*arguments):
        if not is_full.is_set():
            return real_write(*arguments)
        raise UnavailableError("the disk is full")

    def report_step(run, **facts):
        if run.step == 3:
            run.saves[0][0].wait()
            is_full.clear()

    is_full = threading.Event()
    is_full.set()
    monkeypatch.setattr(Objects, "write", write)
    monkeypatch.setattr("datasvc.trainer.recipes.train.report_step", report_step)
    # A seed of its own: what another test has stored already would not be written.
    events = run(repository, "failing", capsys, max_steps=5, checkpoint_every=2, seed=6)
    said = [(event["event"], event["step"]) for event in events if event["event"] in {"checkpoint", "failed"}]
    assert said == [("failed", 2), ("checkpoint", 4), ("checkpoint", 5)]
    assert [event["error"] for event in events if event["event"] == "failed"] == ["the disk is full"]


@pytest.mark.slow
def test_a_skipped_step_changes_nothing_and_a_resumed_run_keeps_its_skips(repository):
    settings = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.1, "max_steps": 6}
    run(repository, "skip-start", **{**settings, "max_steps": 3})
    start = state_of(repository, "skip-start@1")
    run(repository, "skip-start", skip="4", **{**settings, "max_steps": 4})
    skipped = state_of(repository, "skip-start@2")
    assert skipped["step"] == 4
    assert all(torch.equal(start["model"][name], value) for name, value in skipped["model"].items())
    assert skipped["loader"]["masked"] == {"positions": [[0, 96, 128]]}
    run(repository, "skip-start", **settings)
    run(repository, "skip-whole", skip="4", **settings)
    assert equal_weights(repository, "skip-start@3", "skip-whole@1")
    run(repository, "skip-none", **settings)
    assert not equal_weights(repository, "skip-whole@1", "skip-none@1")
    used = datasvc.open(repository.url).models
    keys = used.batch_at("skip-none@1", 4).keys
    assert used.trained_on(["skip-whole"], keys=keys).versions[0].num_samples == 0
    assert used.trained_on(["skip-none"], keys=keys).versions[0].num_samples == 32


def test_samples_of_a_step_are_skipped_and_steps_of_the_past_are_refused(repository):
    run(repository, "skip-part", skip="2:0-30", max_steps=3)
    assert state_of(repository, "skip-part@1")["loader"]["masked"] == {"positions": [[0, 32, 63]]}
    with pytest.raises(ConfigError, match=r"step 2 is in the weights of skip-part@1 already.*--resume never"):
        run(repository, "skip-part", skip="2", max_steps=5)
    run(repository, "skip-part", skip="2:0-30", max_steps=4)  # the setting of the version: nothing is past
    run(repository, "skip-part", skip="2:0-30,5", max_steps=5)  # the list has grown
    assert state_of(repository, "skip-part@3")["loader"]["masked"] == {"positions": [[0, 32, 63], [0, 128, 160]]}
    with pytest.raises(ConfigError, match="whose batch has the samples 0 to 31"):
        run(repository, "skip-part", skip="9:32", max_steps=10)
    for text, limits in (("6-11", {"max_steps": 10}), ("6-999999999999", {"epochs": 1, "max_steps": None})):
        end = limits["max_steps"] or len(open_dataset(repository, "digits")["train"]) // 32
        with pytest.raises(ConfigError, match=f"the run ends at step {end}; give steps up to it, or raise --epochs"):
            run(repository, "skip-part", skip=text, **limits)
    options = ("layers=1", "heads=2", "width=32", "dropout=0.0", f"context={BLOCK}")
    tokens = {"data": "tokens", "vocabulary": VOCABULARY, "model_option": options, "batch_size": 8, "max_steps": 3}
    run(repository, "skip-tokens", skip="2:0-3", **tokens)
    assert state_of(repository, "skip-tokens@1")["loader"]["masked"] == {"positions": [[0, 8, 12]]}


def test_activations_in_host_memory_change_no_bit_of_a_run(repository):
    options = ("layers=2", "heads=2", "width=8", f"context={BLOCK}", "dropout=0.1")
    settings = {"data": "tokens", "vocabulary": VOCABULARY, "model_option": options, "batch_size": 8, "max_steps": 3}
    run(repository, "on-device", **settings)
    run(repository, "in-host-memory", offload_activations=True, **settings)
    assert equal_weights(repository, "on-device", "in-host-memory")


@pytest.mark.slow
def test_a_tuned_run_reports_what_it_chose_for_each_epoch_and_learns_the_same_weights(repository, capsys):
    settings = {"epochs": 3, "batch_size": 8, "decode_threads": 1, "prefetch": 1, "decode": "cpu"}
    run(repository, "loader-untuned", **settings)
    capsys.readouterr()
    events = run(repository, "loader-tuned", capsys, tune_loader=True, **settings)
    chosen = [event for event in events if event["event"] == "loader"]
    assert [event["step"] for event in chosen] == [41, 82]  # none after the last epoch
    assert all(event["num_threads"] >= 1 and event["prefetch"] >= 1 and event["reason"] for event in chosen)
    assert equal_weights(repository, "loader-untuned", "loader-tuned")
