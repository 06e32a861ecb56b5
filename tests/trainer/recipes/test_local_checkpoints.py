"""`--local-checkpoints`: a run that was killed continues from the disk of the node, and ends with the same bits."""

import json

import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.trainer.recipes import train as loop
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("train") / "repo"))
    ingest(repository, str(digits_folder / "val"), "digits", val_fraction=0.1)
    return repository


class KilledError(Exception):
    """Stands for the end of the process."""


def run(repository, name, **settings):
    defaults = {"data": "digits", "size": 16, "batch_size": 32, "epochs": 1, "max_steps": 6, "seed": 3}
    return train(TrainConfig(repo=repository.url, name=name, **{**defaults, **settings}))


def run_killed(repository, name, monkeypatch, where, **settings):
    """Train until `where(run)` is true at the begin of an update, or at the end of the epoch."""

    def update(run, *arguments):
        if where(run):
            raise KilledError
        return real_update(run, *arguments)

    def end_epoch(run):
        if where(run):
            raise KilledError
        real_end(run)

    real_update, real_end = loop.update, loop.end_epoch
    with monkeypatch.context() as patched:
        patched.setattr(loop, "update", update)
        patched.setattr(loop, "end_epoch", end_epoch)
        with pytest.raises(KilledError):
            run(repository, name, **settings)


def events_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def content(repository, ref):
    return describe_model(repository, ref).entry["content"]


def test_a_killed_run_continues_from_the_disk_of_the_node_and_ends_with_the_same_bits(
    repository, tmp_path, monkeypatch, capsys
):
    run(repository, "whole")
    node = {"local_checkpoints": str(tmp_path / "node"), "every_local": 2, "checkpoint_every": 100}
    run_killed(repository, "killed", monkeypatch, lambda run: run.step == 5, **node)
    capsys.readouterr()
    assert run(repository, "killed", **{**node, "every_local": 1}) == "killed@1"
    events = events_of(capsys)
    assert [event["step"] for event in events if event["event"] == "local_checkpoint"] == [5]
    (restored,) = [event for event in events if event["event"] == "restored"]
    assert (restored["version"], restored["lost_steps"]) == ("killed, step 4, on the nodes", 0)
    assert content(repository, "killed") == content(repository, "whole")
    # The version names all that was consumed since the run began.
    (use,) = describe_model(repository, "killed").entry["data"]
    assert use["spans"][0]["start"] == [0, 0]
    assert datasvc.open(repository.url).models.lineage("killed@1").gaps == []


def test_a_run_whose_last_state_is_on_the_node_only_is_complete_and_commits_it(
    repository, tmp_path, monkeypatch, capsys
):
    node = {"local_checkpoints": str(tmp_path / "node"), "every_local": 2, "checkpoint_every": 100}
    run_killed(repository, "ended", monkeypatch, lambda run: run.step == 7, max_steps=9, **node)
    assert run(repository, "ended", max_steps=6, **node) == "ended@1"
    assert "nothing is left to train: ended is complete, at step 6" in capsys.readouterr().err
    assert describe_model(repository, "ended@1").entry["step"] == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_local": 5}, "give both --local-checkpoints FOLDER and --every-local STEPS"),
        ({"local_checkpoints": "x"}, "give both --local-checkpoints FOLDER and --every-local STEPS"),
        ({"local_checkpoints": "", "every_local": 5}, "local_checkpoints is empty"),
        ({"local_checkpoints": "x", "every_local": 1000}, "give fewer steps for --every-local"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(repo="x", name="m", data="digits", **settings)
