"""Rounds of an elastic run in one process; tests/distributed/test_recipe_elastic.py kills real ranks."""

import contextlib
import dataclasses
import json
import sys

import numpy as np
import pytest
import torch

import datasvc
import datasvc.trainer as hvd
from datasvc.cache import Cache
from datasvc.errors import ConfigError, UnavailableError
from datasvc.ledger.audit import audit
from datasvc.ledger.broken_rounds import RoundPart
from datasvc.ledger.file import read_ledger
from datasvc.models import describe_model, model_log
from datasvc.models.saving.rank_channel import LostRankError
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.trainer.job import runtime as hvd_runtime
from datasvc.trainer.optim import optimizer as optimizers
from datasvc.trainer.recipes import elastic_memory
from datasvc.trainer.recipes import train as training
from datasvc.trainer.recipes.elastic_memory import (
    ElasticMemory,
    copy_to_host,
    load_snapshot,
    reporting_lost_ranks,
    take_snapshot,
)
from datasvc.trainer.recipes.layouts.places import IN_ROUND, Place, StateCopy
from datasvc.trainer.recipes.random_state import seed_of_rank
from datasvc.trainer.recipes.rejoin import call_on_first_rank
from datasvc.trainer.recipes.reporting.events import choose_events
from datasvc.trainer.recipes.reporting.recorder import RUN_LOG, LoggedEvents
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.start import start
from datasvc.trainer.recipes.update import WeightAverage
from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt
from tests.samples import write_folder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    repository = Repository.create(str(folder / "repo"))
    counts = {"train": {"cat": 40, "dog": 40}, "val": {"cat": 8, "dog": 8}}
    ingest(repository, str(write_folder(folder / "pets", counts)), "pets")
    return repository


# fmt: off
SETTINGS = {
    "size": 16, "global_batch": 8, "epochs": 2, "evaluate_every": 1, "checkpoint_every": 4, "patience": 5,
    "optimizer": "lamb", "learning_rate": 0.01, "ema_decay": 0.9,
}
# fmt: on


def run(repository, name, capsys, **settings):
    """Train for two epochs of 10 steps with --elastic; returns the events."""
    elastic = {"elastic": True, "commit_every": 3}
    training.train(TrainConfig(repo=repository.url, data="pets", name=name, **SETTINGS | elastic | settings))
    printed = capsys.readouterr()
    # These tests have no launcher.
    assert "elastic has no effect in a job whose ranks cannot change: start it with datasvc-run" in printed.err
    return [json.loads(line) for line in printed.out.splitlines()]


def weights(repository, ref):
    return datasvc.open(repository.url).models.restore(ref).state["model"]


def check_equal(repository, name, other):
    found, expected = weights(repository, name), weights(repository, other)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert describe_model(repository, name).entry["metrics"] == describe_model(repository, other).entry["metrics"]
    stops = [datasvc.open(repository.url).models.restore(each).state["early_stop"] for each in (name, other)]
    assert stops[0] == stops[1]


@pytest.fixture(scope="module")
def undisturbed(repository):
    """Name of a model that was trained without `elastic`."""
    training.train(TrainConfig(repo=repository.url, data="pets", name="undisturbed", **SETTINGS))
    return "undisturbed"


def losing_ranks(monkeypatch, fails_before):
    """Lose a rank before each of these steps, in order; return the list of those that are left."""
    real_update = training.update

    def update(run, batch, mark):
        if fails_before and run.step == fails_before[0]:
            del fails_before[0]
            raise hvd.HorovodInternalError(f"a rank was lost, {len(fails_before)} are left to lose")
        return real_update(run, batch, mark)

    monkeypatch.setattr(training, "update", update)
    return fails_before


def test_failures_repeat_the_steps_since_the_last_commit_and_change_nothing(
    repository, undisturbed, tmp_path, capsys, monkeypatch
):
    fails_before = losing_ranks(monkeypatch, [2, 8, 8, 10, 17])  # the first before any commit
    events = run(repository, "failing", capsys, ledger=str(tmp_path))
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 0, 6, 6, 10, 15]
    assert not fails_before
    check_equal(repository, "failing", undisturbed)
    assert audit([list(read_ledger(tmp_path))]).is_proven
    (use,) = describe_model(repository, "failing").entry["data"]
    assert [(span["start"], span["stop"], span["step"]) for span in use["spans"]][-1] == ([1, 40], [2, 0], 15)
    # A version that was saved in a round that failed is not the parent of the steps that were repeated before it.
    steps = {str(version): version.entry["step"] for version in model_log(repository, "failing")}
    parents = {str(version): version.entry["parent"] for version in model_log(repository, "failing")}
    assert all(steps[parent] < steps[name] for name, parent in parents.items() if parent is not None)


@pytest.fixture
def keeping_step_ends(monkeypatch):
    """Let the only rank of a job keep the ends of its steps, as one of several does."""
    monkeypatch.setattr(elastic_memory, "keeps_step_ends", lambda run: True)


def losing_a_rank_in(monkeypatch, owner, name, *steps):
    """Lose a rank once per step in a function of an object, after it has done its work."""
    real, left = getattr(owner, name), list(steps)

    def fails(run, *words, **options):
        result = real(run, *words, **options)
        if left and run.step == left[0]:
            del left[0]
            raise hvd.HorovodInternalError("a rank was lost")
        return result

    monkeypatch.setattr(owner, name, fails)
    return left


@pytest.mark.usefixtures("keeping_step_ends")
def test_a_rank_that_is_lost_before_the_weights_change_costs_no_step(
    repository, undisturbed, tmp_path, capsys, monkeypatch
):
    """The loader has served the batch of the lost step already."""
    left = losing_a_rank_in(monkeypatch, sys.modules["datasvc.trainer.recipes.update"], "accumulate", 2, 8, 8, 10, 17)
    events = run(repository, "kept", capsys, ledger=str(tmp_path), commit_every=1000)
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 2, 8, 8, 10, 17]
    assert not left
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == sorted(set(steps))
    check_equal(repository, "kept", undisturbed)
    assert audit([list(read_ledger(tmp_path))]).is_proven
    (use,) = describe_model(repository, "kept").entry["data"]
    assert [span["step"] for span in use["spans"]] == [0, 2, 8, 10, 17]
    versions = list(model_log(repository, "kept"))
    assert [each.entry["parent"] for each in versions[1:]] == [str(each) for each in versions[:-1]]


@pytest.mark.slow
@pytest.mark.usefixtures("keeping_step_ends")
def test_an_evaluation_that_was_repeated_is_not_repeated_once_more(repository, undisturbed, capsys, monkeypatch):
    evaluations = losing_a_rank_in(monkeypatch, training, "evaluate_run", 10)
    left = losing_a_rank_in(monkeypatch, sys.modules["datasvc.trainer.recipes.update"], "accumulate", 10)
    events = run(repository, "evaluated", capsys, commit_every=1000)
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 10, 10]
    assert not evaluations
    assert not left
    check_equal(repository, "evaluated", undisturbed)
    assert [version.entry["step"] for version in model_log(repository, "evaluated")].count(10) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("keeping_step_ends")
def test_a_rank_that_cannot_copy_its_state_goes_back_to_the_last_copy(repository, undisturbed, capsys, monkeypatch):
    real = elastic_memory.take_snapshot

    def take_snapshot(run, **options):
        if "in_round" in options:
            raise MemoryError
        return real(run, **options)

    monkeypatch.setattr(elastic_memory, "take_snapshot", take_snapshot)
    losing_a_rank_in(monkeypatch, sys.modules["datasvc.trainer.recipes.update"], "accumulate", 8)
    events = run(repository, "too-large", capsys)
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 6]
    check_equal(repository, "too-large", undisturbed)


@pytest.mark.slow
@pytest.mark.usefixtures("keeping_step_ends")
def test_the_statistics_of_batch_normalisation_are_those_before_the_lost_step(repository, capsys, monkeypatch):
    settings = {"model": "resnet18", "max_steps": 4, "commit_every": 1000, "ema_decay": None}
    run(repository, "normalised", capsys, **settings)
    left = losing_a_rank_in(monkeypatch, sys.modules["datasvc.trainer.recipes.update"], "accumulate", 2)
    events = run(repository, "normalised-kept", capsys, **settings)
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 2]
    assert not left
    assert any("running_mean" in name for name in weights(repository, "normalised"))
    check_equal(repository, "normalised-kept", "normalised")


@pytest.mark.slow
@pytest.mark.usefixtures("keeping_step_ends")
@pytest.mark.parametrize(
    ("name", "steps", "rounds"),
    [("evaluate_run", (10, 20), [0, 10, 20]), ("commit", (4, 10, 20), [0, 4, 10, 20]), ("end_epoch", (20,), [0, 20])],
)
def test_a_rank_that_is_lost_in_an_evaluation_or_a_save_costs_no_step(
    repository, undisturbed, capsys, monkeypatch, name, steps, rounds
):
    left = losing_a_rank_in(monkeypatch, training, name, *steps)
    events = run(repository, f"kept-{name}".replace("_", "-"), capsys, commit_every=1000)
    assert [event["step"] for event in events if event["event"] == "round"] == rounds
    assert not left
    check_equal(repository, f"kept-{name}".replace("_", "-"), undisturbed)


@pytest.mark.slow
@pytest.mark.usefixtures("keeping_step_ends")
def test_a_rank_that_fails_while_its_weights_change_goes_back_to_the_last_copy(
    repository, undisturbed, capsys, monkeypatch
):
    real_step, left = WeightAverage.update, [7]

    def update(average):
        real_step(average)
        if left and average._num_updates > left[0]:
            left.clear()
            raise hvd.HorovodInternalError("a rank was lost")

    monkeypatch.setattr(WeightAverage, "update", update)
    events = run(repository, "half-updated", capsys)
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 6]
    check_equal(repository, "half-updated", undisturbed)


@pytest.mark.slow
def test_with_averages_a_failure_repeats_the_steps_since_the_last_round_of_all_ranks(
    repository, tmp_path, capsys, monkeypatch
):
    """A copy is due after steps 3, 6, 9, 10, 12, ..., and made after the next multiple of 4."""
    settings = {"sync": "diloco:4:delay=1", "ema_decay": None}
    run(repository, "averaged", capsys, **settings)
    losing_ranks(monkeypatch, [2, 7, 11, 15, 19])
    events = run(repository, "averaged-failing", capsys, ledger=str(tmp_path), **settings)
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 0, 4, 8, 12, 16]
    check_equal(repository, "averaged-failing", "averaged")
    assert audit([list(read_ledger(tmp_path))]).is_proven


@pytest.mark.slow
@pytest.mark.usefixtures("keeping_step_ends")
def test_a_version_of_a_round_in_which_a_rank_is_lost_later_is_no_parent_and_its_rest_ends_with_a_copy(
    repository, capsys, monkeypatch
):
    """A rank is lost after step 7 of the round that began after step 4; versions are saved after steps 3 and 6."""
    real_update, left = training.update, [7]
    real_save, copied = ElasticMemory.save, []

    def save(memory):
        copied.append(memory._run.step)
        real_save(memory)

    def update(run, batch, mark):
        if left and run.step == left[0]:
            left.clear()
            for handle, _ in run.saves:
                handle.wait()
            raise hvd.HorovodInternalError("a rank was lost")
        return real_update(run, batch, mark)

    monkeypatch.setattr(training, "update", update)
    monkeypatch.setattr(ElasticMemory, "save", save)
    events = run(
        repository, "saved-in-round", capsys, sync="local:4", ema_decay=None, checkpoint_every=3, commit_every=3
    )
    assert [(event["step"], event.get("kept_samples")) for event in events if event["event"] == "round"] == [
        (0, None),
        (4, 24),
    ]
    assert not left
    versions = [version.entry for version in model_log(repository, "saved-in-round")]
    parents = [(entry["step"], entry["parent"]) for entry in versions]
    assert parents[:3] == [(3, None), (6, "saved-in-round@1"), (8, "saved-in-round@1")]
    assert copied[:2] == [4, 8]  # the first after steps 3 and 6 that end a round


@pytest.mark.slow
def test_a_loss_scale_that_has_fallen_is_that_of_the_round_after_a_failure(repository, capsys, monkeypatch):
    """A gradient overflows in the fifth step; a rank is lost two steps later, and another before the next copy."""
    real_update, scales, fails_before = training.update, [], set()

    def update(run, batch, mark):
        if run.step in fails_before:
            fails_before.remove(run.step)
            raise hvd.HorovodInternalError("a rank was lost")
        if run.step == 4:
            hook = run.model[-1].weight.register_hook(lambda gradient: gradient * torch.inf)
            loss = real_update(run, batch, mark)
            hook.remove()
            return loss
        return real_update(run, batch, mark)

    def note_scale(run, snapshot):
        load_snapshot(run, snapshot)
        scales.append((run.step, run.loss_scale.get_scale()))

    monkeypatch.setattr(training, "update", update)
    monkeypatch.setattr(sys.modules[start.__module__], "load_snapshot", note_scale)
    run(repository, "overflowed", capsys, precision="fp16")
    assert scales == []
    fails_before |= {7, 8}
    run(repository, "overflowed-and-lost", capsys, precision="fp16")
    assert scales == [(6, 2.0**15), (6, 2.0**15)]  # once half of torch's first scale
    check_equal(repository, "overflowed-and-lost", "overflowed")
    states = [
        datasvc.open(repository.url).models.restore(name).state for name in ("overflowed", "overflowed-and-lost")
    ]
    assert states[0]["loss_scale"] == states[1]["loss_scale"]
    assert states[0]["loss_scale"]["scale"] == 2.0**15


@pytest.mark.slow
def test_a_change_of_hosts_continues_the_newest_version(repository, undisturbed, capsys, monkeypatch):
    changes = {6, 15}

    def check_host_updates(memory):
        if memory.snapshot.step in changes:
            changes.remove(memory.snapshot.step)
            raise HostsUpdatedInterrupt

    monkeypatch.setattr(ElasticMemory, "check_host_updates", check_host_updates)
    events = run(repository, "resized", capsys)
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 6, 15]
    check_equal(repository, "resized", undisturbed)
    parents = {str(version): version.entry["parent"] for version in model_log(repository, "resized")}
    numbered = [f"resized@{number}" for number in range(1, len(parents) + 1)]
    assert parents == dict(zip(numbered, [None, *numbered], strict=False))


@pytest.mark.slow
def test_a_rank_lost_while_the_last_checkpoint_is_written_is_no_loss(repository, undisturbed, capsys, monkeypatch):
    real_end, is_lost = training.end, [True]

    def end(run):
        if is_lost.pop() if is_lost else False:
            raise hvd.HorovodInternalError("a rank was lost")
        real_end(run)

    monkeypatch.setattr(training, "end", end)
    events = run(repository, "ending", capsys)
    assert [event["step"] for event in events if event["event"] == "round"] == [0, 20]
    assert events[-1]["event"] == "end"
    check_equal(repository, "ending", undisturbed)


def test_a_snapshot_shares_no_memory_with_the_run():
    weight = torch.ones(3)
    tree = {"a": [weight, 1], "b": (weight, "c")}
    copied = copy_to_host(tree)
    weight += 1
    assert copied["a"][0].tolist() == copied["b"][0].tolist() == [1, 1, 1]
    assert (copied["a"][1], copied["b"][1]) == (1, "c")


@pytest.fixture
def compressed(repository):
    """A run whose top-k compression has a residual of ones for its first parameter."""
    hvd.init()
    config = TrainConfig(repo=repository.url, data="pets", name="compressed", compression="topk:0.1", **SETTINGS)
    run = start(config, LoggedEvents(choose_events(sys.stdout)))
    weight = run.optimizer.param_groups[0]["params"][0]
    run.optimizer._exchange.memory[0] = {"residual": torch.ones_like(weight)}
    with contextlib.closing(run), run.checkpoints:
        yield run
    hvd.shutdown()


def residuals_of(run):
    return [values["residual"] for values in run.optimizer._exchange.memory.values()]


def test_the_residuals_of_a_snapshot_are_loaded_only_in_the_process_that_took_it(compressed, monkeypatch):
    snapshot = take_snapshot(compressed)
    load_snapshot(compressed, snapshot)
    assert len(residuals_of(compressed)) == 1
    # Another process, with the number of the rank that took the snapshot.
    monkeypatch.setattr(optimizers, "_process_token", "other")
    load_snapshot(compressed, snapshot)
    assert not residuals_of(compressed)


def sync_as_rank_1(memory, of_rank_0, monkeypatch):
    """Synchronize with a rank 0 that has this snapshot, and what it sends."""
    parts = {"place", "model", "average_statistics", "optimizer", "average", "round_part"}
    fields = {field.name: getattr(of_rank_0, field.name) for field in dataclasses.fields(of_rank_0)}

    def broadcast(value, source, name, *_process_set):
        sent = {key: each for key, each in fields.items() if (key in parts) == (name == "elastic.parts")}
        return value if source == 1 else sent

    copy = StateCopy(of_rank_0.commit, dataclasses.replace(of_rank_0.place, replica=0))
    if memory.config.averages_weights:
        memory.snapshot = dataclasses.replace(memory.snapshot, place=Place(1))
    with monkeypatch.context() as patch:
        patch.setattr(hvd, "size", lambda: 2)
        patch.setattr(hvd, "rank", lambda: 1)
        patch.setattr(elastic_memory, "allgather_object", lambda own, name: [([copy], True), own])
        patch.setattr(elastic_memory, "broadcast_object", broadcast)
        memory.sync()
    assert memory.has_saved


@pytest.mark.parametrize(("step", "kept"), [(0, [1.0]), (3, [])])
def test_a_rank_keeps_its_own_residuals_if_it_has_a_copy_of_the_newest_commit(compressed, monkeypatch, step, kept):
    memory = ElasticMemory(compressed.config)
    memory.snapshot = take_snapshot(compressed)
    compressed.step = step
    residuals_of(compressed)[0].fill_(2)
    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "_process_token", "rank 0")
        of_rank_0 = take_snapshot(compressed)
    sync_as_rank_1(memory, of_rank_0, monkeypatch)
    load_snapshot(compressed, memory.snapshot)
    assert [float(residual.max()) for residual in residuals_of(compressed)] == kept


def test_a_rank_that_is_lost_while_parts_are_sent_costs_no_copy(compressed, monkeypatch):
    memory = ElasticMemory(compressed.config)
    memory.snapshot = own = take_snapshot(compressed)

    def lose(*_):
        raise hvd.HorovodInternalError("rank 1 is gone")

    with monkeypatch.context() as patch:
        patch.setattr(elastic_memory, "broadcast_object", lose)
        with pytest.raises(hvd.HorovodInternalError):
            memory.sync()
    assert memory.snapshot is own
    # The copy of before is left too, until all ranks have got what was sent.
    monkeypatch.setattr(elastic_memory, "_round_number", lambda: 7)
    memory.sync()
    assert [copy.commit for copy in (memory.snapshot, *memory._older)] == [(7, own.step, False), own.commit]


def test_a_rank_goes_back_with_the_other_one_of_its_replica_and_keeps_the_copy_before_the_round(
    compressed, monkeypatch
):
    """It is a step further in the rest of a round than the other, which has only the copy of its start."""
    before = take_snapshot(compressed)
    part = RoundPart(0, 0, 2, 8, 4, np.arange(4))
    start = dataclasses.replace(before, commit=(2, 0, IN_ROUND), place=Place(0, 0), round_part=part)
    later = dataclasses.replace(start, round_part=dataclasses.replace(part, applied=np.arange(6)))
    memory = ElasticMemory(compressed.config)
    memory.snapshot, memory._older = later, [start, before]
    other = dataclasses.replace(start.as_copy, place=Place(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(hvd, "size", lambda: 2)
        patch.setattr(elastic_memory, "find_places", lambda *_, **_options: [Place(0, 0), Place(0, 1)])
        patch.setattr(elastic_memory, "allgather_object", lambda own, name: [own, ([other], True)])
        patch.setattr(elastic_memory, "broadcast_object", lambda value, *_: value)
        memory.sync()
    assert memory.snapshot.round_part.applied.tolist() == [0, 1, 2, 3]
    with memory.holding(compressed):
        assert [copy.commit for copy in memory._older] == [before.commit]


def test_the_rest_of_a_round_has_other_random_numbers_than_its_start(compressed):
    snapshot = take_snapshot(compressed)
    seeds = []
    for applied in ([], [3], [3, 4]):
        part = RoundPart(0, 0, 2, 8, 4, np.array(applied, np.int64))
        load_snapshot(compressed, dataclasses.replace(snapshot, round_part=part))
        seeds.append(torch.initial_seed())
    assert seeds[0] == seed_of_rank(compressed.config.seed, 0, step=snapshot.step)
    assert len(set(seeds)) == 3


@pytest.fixture
def averaging(repository):
    """A run of DiLoCo whose momentum of the first parameter is 1, and the residual of its codec too."""
    hvd.init()
    settings = SETTINGS | {"optimizer": "sgd", "ema_decay": None, "sync": "diloco:1:codec=int8"}
    run = start(
        TrainConfig(repo=repository.url, data="pets", name="averaging", **settings),
        LoggedEvents(choose_events(sys.stdout)),
    )
    run.model(torch.zeros(2, 3, 16, 16)).sum().backward()
    run.optimizer.step()
    for state in run.optimizer.state.values():
        state["momentum_buffer"].fill_(1)
    outer = run.optimizer._outer
    outer._memory.update({0: {"residual": torch.ones_like(outer.weights[0])}})
    with contextlib.closing(run), run.checkpoints:
        yield run
    hvd.shutdown()


@pytest.mark.parametrize(("step", "own"), [(1, True), (3, False)])
def test_a_rank_keeps_its_own_moments_if_it_has_a_copy_of_the_newest_commit(averaging, monkeypatch, step, own):
    averaging.step, memory = 1, ElasticMemory(averaging.config)
    memory.snapshot = take_snapshot(averaging)
    averaging.step = step
    for state in averaging.optimizer.state.values():
        state["momentum_buffer"].fill_(2)
    averaging.optimizer._outer._memory[0]["residual"].fill_(2)
    of_rank_0 = take_snapshot(averaging)
    sync_as_rank_1(memory, of_rank_0, monkeypatch)
    # This rank had another number when it took its copy.
    if own:
        memory.snapshot.optimizer["averaging"]["outer"]["rank"] = 5
    load_snapshot(averaging, memory.snapshot)
    first = next(iter(averaging.optimizer.state.values()))
    assert first["momentum_buffer"].unique().tolist() == [1.0 if own else 2.0]
    kept = averaging.optimizer._outer._memory.get(0, {})
    assert ([float(kept["residual"].max())] if "residual" in kept else []) == [1.0] * own


def test_between_rounds_a_rank_finds_that_another_is_lost(averaging, monkeypatch):
    memory = ElasticMemory(averaging.config)
    monkeypatch.setattr(averaging, "close", lambda _error: None)
    with pytest.raises(hvd.HorovodInternalError, match="rank 7 is gone"), memory.holding(averaging):
        memory.commit_when_due(is_due=False)
        monkeypatch.setattr(hvd_runtime.current_job().engine, "_end_reason", "rank 7 is gone")
        memory.commit_when_due(is_due=False)


@pytest.mark.slow
def test_each_round_closes_its_cache(repository, tmp_path, capsys, monkeypatch):
    opened = []

    class RecordedCache(Cache):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            opened.append(self)

    monkeypatch.setattr("datasvc.trainer.recipes.start.Cache", RecordedCache)
    losing_ranks(monkeypatch, [2])
    run(repository, "cached", capsys, max_steps=4, cache=str(tmp_path / "cache"), cache_budget="50MB")
    assert len(opened) == 2
    for cache in opened:
        with pytest.raises(ConfigError, match="was closed"):
            cache.new_job()


def test_every_rank_has_the_ids_of_the_trackers_runs(repository, tmp_path, monkeypatch):
    hvd.init()

    # As on a rank other than 0, to which rank 0 sends what it has opened.
    def answer_of_rank_0(function, *, name):
        return {"wandb": "run-7"} if name == "logs" else call_on_first_rank(function, name=name)

    monkeypatch.setattr("datasvc.trainer.recipes.start.call_on_first_rank", answer_of_rank_0)
    monkeypatch.setattr("datasvc.trainer.recipes.start.open_logs", None)
    config = TrainConfig(repo=repository.url, data="pets", name="tracked", log_to=("wandb:p",), **SETTINGS)
    started = start(config, LoggedEvents(choose_events(sys.stdout)))
    with contextlib.closing(started), started.checkpoints:
        assert take_snapshot(started).log_ids["wandb"] == "run-7"
        assert take_snapshot(started).log_ids[RUN_LOG] == started.recorder.log.id
        assert not started.logs
    hvd.shutdown()


def test_a_copy_has_the_shares_of_the_rounds_that_follow(repository):
    hvd.init()
    averaged = SETTINGS | {"sync": "local:2", "leases": "measured", "ema_decay": None}
    config = TrainConfig(repo=repository.url, data="pets", name="leased", **averaged)
    started = start(config, LoggedEvents(choose_events(sys.stdout)))
    with contextlib.closing(started), started.checkpoints:
        snapshot = take_snapshot(started)
        assert snapshot.leases == {"planned": [[2], [2]]}
        unequal = {"planned": [[3, 1], [1, 3]]}
        load_snapshot(started, dataclasses.replace(snapshot, leases=unequal))
        assert started.saved_leases == unequal
    hvd.shutdown()


def test_only_the_loss_of_a_rank_starts_a_new_round():
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 lost"), reporting_lost_ranks():
        raise UnavailableError("the save failed: rank 1 lost the connection") from LostRankError("rank 1 is lost")
    with pytest.raises(UnavailableError), reporting_lost_ranks():
        raise UnavailableError("the store does not answer")
