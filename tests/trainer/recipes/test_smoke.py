"""A smoke run of the training program, in a world of one: it has the batch of the whole job, and stores nothing."""

import json
from pathlib import Path

import pytest

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.repository import Repository
from datasvc.repository.store.storage import Storage
from datasvc.shards import ingest
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.smoke import SmokeRun, plan_smoke_config
from datasvc.trainer.recipes.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("smoke") / "repo"))
    ingest(repository, str(digits_folder / "val"), "digits", val_fraction=0.5, limit=200)
    return repository


def make_config(repository=None, **settings):
    url = "unused" if repository is None else repository.url
    given = {"data": "digits@1", "name": "smoked", "size": 16, "flip": 0.0, "batch_size": 8, **settings}
    return TrainConfig(repo=url, epochs=1, **given)


def list_files(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path(folder).rglob("*") if path.is_file())


@pytest.fixture
def smoke(monkeypatch, capsys):
    """Make a smoke run; returns its last event."""

    def run(config, *, ranks=2):
        monkeypatch.setenv("DATASVC_SMOKE_STEPS", "2")
        monkeypatch.setenv("DATASVC_SMOKE_RANKS", str(ranks))
        with pytest.raises(SystemExit) as caught:
            train(config)
        monkeypatch.delenv("DATASVC_SMOKE_STEPS")
        assert caught.value.code == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_it_makes_two_steps_with_the_batch_of_a_rank_of_the_job_and_stores_nothing(repository, smoke, tmp_path):
    assert hvd.smoke_steps() is None
    records = {"ledger": str(tmp_path / "ledger"), "profile": str(tmp_path / "trace"), "signals": "loss"}
    records |= {"log_to": (f"tensorboard:{tmp_path}/curves",)} | {
        "local_checkpoints": str(tmp_path),
        "every_local": 1,
    }
    config = make_config(repository, global_batch=24, **records)
    before = list_files(repository.url)
    event = smoke(config)
    assert (event["event"], event["steps"], event["batch_size"]) == ("smoke", 2, 12)
    assert list_files(repository.url) == before
    assert list_files(tmp_path) == []


def test_it_continues_the_checkpoint_of_the_job_and_makes_no_step_of_a_complete_run(repository, smoke):
    train(make_config(repository, max_steps=1))
    before = list_files(repository.url)
    assert smoke(make_config(repository, max_steps=1))["steps"] == 0
    assert smoke(make_config(repository, max_steps=2))["steps"] == 2
    assert list_files(repository.url) == before


def test_a_repository_that_cannot_be_written_fails_it(repository, smoke, monkeypatch):
    def refuse(*_):
        raise ConfigError("access denied")

    monkeypatch.setattr(Storage, "create_temporary", refuse)
    with pytest.raises(ConfigError, match="access denied"):
        smoke(make_config(repository))


def test_the_settings_are_checked_for_the_number_of_ranks_of_the_job():
    with pytest.raises(ConfigError, match="cannot be divided evenly among 3 data ranks"):
        plan_smoke_config(make_config(global_batch=8), SmokeRun(2, job_size=3), 1)


def test_only_the_axis_data_of_a_layout_is_smaller():
    config = make_config(layout="shard=2", global_batch=32)
    planned = plan_smoke_config(config, SmokeRun(2, job_size=8), 2)
    assert (planned.layout, planned.batch_size, planned.global_batch) == ("shard=2", 4, None)
    assert plan_smoke_config(config, SmokeRun(2, job_size=8), 4).layout == "data=2,shard=2"
    with pytest.raises(ConfigError, match=r"needs a multiple of 2.*give --smoke 2"):
        plan_smoke_config(config, SmokeRun(2, job_size=8), 1)
