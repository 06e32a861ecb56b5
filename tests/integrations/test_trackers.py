"""MLflow and Weights & Biases: a run that is killed goes on as the same run; lineage and versions are in them."""

import json
import os
import signal
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import pytest
import torch

import datasvc
from datasvc.errors import ConfigError
from datasvc.loaders import ImageLoader
from datasvc.models import ConsumptionTracker
from datasvc.testing import small_dataset
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train as train_by_program
from tests.integrations.tracked_training import NUM_STEPS, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_an_experiment")]

ROOT = Path(__file__).parents[2]
BLOCK, FULL, LAST = 32768, 1, 4  # of a wandb file


@pytest.fixture
def repo(tmp_path):
    small_dataset(str(tmp_path / "repo"), "pets", samples=16)
    return datasvc.open(str(tmp_path / "repo"))


def run(tracker, repo, folder, killed_after, **environment):
    """Train in another process, from a folder that the tracker may write to."""
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tests/integrations/tracked_training.py",
            repo.repository.url,
            tracker,
            str(killed_after),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == (-signal.SIGKILL if killed_after else 0), done.stderr


def train_untracked(repo):
    """Return the losses by step of a training that nobody disturbs."""
    losses = {}
    train(repo, "whole", losses.__setitem__, {})
    assert list(losses) == list(range(1, NUM_STEPS + 1))
    return losses


def run_of(repo, tracker):
    """Return the id that all versions of the training have."""
    (run_id,) = {
        repo.repository.entry(version).content["config"][f"{tracker}_run"]
        for version in repo.models.versions(tracker)
    }
    return run_id


def save_trained(repo, **config):
    """Save a version that has read 8 samples of pets@1."""
    with ImageLoader(repo.dataset("pets@1")["train"], batch_size=8, training=True, size=8) as loader:
        reading = ConsumptionTracker(loader)
        next(iter(loader))
        repo.models.save("net", {"weight": torch.ones(2)}, step=1, data=[reading.use()], config=config)


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed, with which MLflow keeps runs in a file")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db")
    yield mlflow
    mlflow.set_tracking_uri(None)


def test_a_killed_run_of_mlflow_continues_with_equal_losses(mlflow, repo, tmp_path):
    uri = {"MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}
    for killed_after in (3, 0):  # the newest version is older than the newest point
        run("mlflow", repo, tmp_path, killed_after, **uri)
    client, run_id = mlflow.MlflowClient(), run_of(repo, "mlflow")
    assert client.get_run(run_id).info.status == "FINISHED"
    points = client.get_metric_history(run_id, "loss")
    assert {point.step: point.value for point in points} == train_untracked(repo)
    assert len(client.search_runs(["0"])) == 1


def test_mlflow_has_the_data_of_a_version_and_a_registered_model_that_names_it(mlflow, repo):
    from datasvc.integrations.mlflow import SplitSource, log_inputs, register, resolve, run_config

    with mlflow.start_run() as started:
        save_trained(repo, **run_config(started))
        for _ in range(2):  # the second call changes nothing
            log_inputs(repo, "net@1")
    (read,) = mlflow.get_run(started.info.run_id).inputs.dataset_inputs
    split = repo.dataset("pets@1")["train"]
    assert (read.dataset.name, read.dataset.digest) == ("pets@1/train", split.digest[:36])
    assert {tag.key: tag.value for tag in read.tags} == {
        "mlflow.data.context": "training",
        "datasvc.version": "net@1",
        "datasvc.epoch": "0",
        "datasvc.position": "8",
    }
    assert SplitSource.from_json(read.dataset.source).load().digest == split.digest

    repo.models.tag("net@1", "prod")
    registered = register(repo, "net@prod", alias="champion")
    assert register(repo, "net@1").version == registered.version
    assert registered.run_id == started.info.run_id
    assert registered.tags["datasvc.data"] == "pets@1/train"
    for uri in ("models:/net@champion", f"models:/net/{registered.version}"):
        assert repo.models.restore(resolve(repo, uri)).entry["step"] == 1
    mlflow.MlflowClient().create_registered_model("other")
    mlflow.MlflowClient().create_model_version("other", source="s3://bucket/model")
    with pytest.raises(ConfigError, match="models:/other/1 is no model version of datasvc"):
        resolve(repo, "models:/other/1")
    with pytest.raises(ConfigError, match="expected models:/NAME/VERSION"):
        resolve(repo, "net@prod")


def test_a_registered_version_is_found_by_its_commit_and_not_by_its_number(mlflow, repo, tmp_path):
    from datasvc.integrations.mlflow import register, resolve

    save_trained(repo)
    register(repo, "net@1", name="moved", alias="a")
    other = datasvc.open(str(tmp_path / "other"), create=True)
    with pytest.raises(ConfigError, match=r"is net@1 of .*repo, commit \w+; no version of 'net' in .*other has this"):
        resolve(other, "models:/moved@a")
    other.models.save("net", {"weight": torch.zeros(2)}, step=1)
    with pytest.raises(ConfigError, match="pull the version from it"):
        resolve(other, "models:/moved@a")
    other.models.pull(repo.repository.url, ["net@1"])
    assert resolve(other, "models:/moved@a") == "net@2"


def test_two_processes_that_register_at_once_give_one_version(mlflow, repo, monkeypatch):
    from datasvc.integrations.mlflow import register

    save_trained(repo)
    create, first = mlflow.MlflowClient.create_model_version, []

    def create_after_another(*arguments, **options):
        monkeypatch.setattr(mlflow.MlflowClient, "create_model_version", create)
        first.append(register(repo, "net@1", name="raced"))  # what another process does after the search of this one
        return create(*arguments, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "create_model_version", create_after_another)
    assert register(repo, "net@1", name="raced", alias="a").version == first[0].version
    client = mlflow.MlflowClient()
    (only,) = client.search_model_versions("name='raced'")
    assert only.version == first[0].version == client.get_model_version_by_alias("raced", "a").version


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_run_of_the_training_program_is_that_of_the_model(tracker, request, repo, tmp_path, monkeypatch):
    """`register` finds it, and a program with `start_run` continues it."""
    package = request.getfixturevalue(tracker)
    place = {"mlflow": "digits", "wandb": "p"}[tracker]
    sizes = {"size": 16, "batch_size": 8, "max_steps": 1}
    train_by_program(
        TrainConfig(repo=repo.repository.url, data="pets", name="net", log_to=(f"{tracker}:{place}",), **sizes)
    )
    run_id = repo.models.restore("net").entry["config"][f"{tracker}_run"]
    module = import_module(f"datasvc.integrations.{tracker}")
    with module.start_run(repo, "net", **({} if tracker == "mlflow" else {"project": place})) as continued:
        assert module.run_config(continued) == {f"{tracker}_run": run_id}
    if tracker == "mlflow":
        assert module.register(repo, "net", name="trained").run_id == run_id
        package.set_experiment(experiment_id="0")  # the training program has set another one


def wandb_records(path):
    """Return what wandb keeps of an offline run: records in blocks of 32 KiB, as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, records = path.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left  # the rest of a block is padding
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in {FULL, LAST}:
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    return records


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # it keeps the settings of the first run of a process
    yield wandb
    wandb.teardown()


def test_a_killed_run_of_wandb_continues_under_its_id_with_equal_losses(wandb, repo, tmp_path):
    run("wandb", repo, tmp_path, 3)
    rmtree(tmp_path / "wandb")  # the second process writes a file of its own
    run("wandb", repo, tmp_path, 0)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = wandb_records(path)
    assert {record.run.run_id for record in records if record.HasField("run")} == {run_of(repo, "wandb")}
    points = [record.history.item for record in records if record.HasField("history")]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in items} for items in points]
    expected = {step: loss for step, loss in train_untracked(repo).items() if step > 2}
    assert {row["_step"]: row["loss"] for row in rows} == expected


def test_wandb_has_the_data_of_a_version_and_an_artifact_that_names_it(wandb, repo, tmp_path):
    from datasvc.integrations.wandb import log_inputs, log_version, resolve, run_config, start_run

    with start_run(repo, "net", project="p") as started:
        save_trained(repo, **run_config(started))
        log_inputs(started, repo, "net@1")
        (read,) = started.config["datasvc.inputs"]
        artifact = log_version(started, repo, "net@1", aliases=["prod"])
        assert resolve(repo, artifact) == "net@1"
    assert (read["name"], read["position"]) == ("pets@1/train", 8)
    assert read["digest"] == repo.dataset("pets@1")["train"].digest
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    (logged,) = [record.artifact for record in wandb_records(path) if record.HasField("artifact")]
    assert (logged.name, logged.type, sorted(logged.aliases)) == ("net", "model", ["latest", "prod"])
    with pytest.raises(ConfigError, match="'other' is no model version of datasvc"):
        resolve(repo, wandb.Artifact("other", "model"))
    other = datasvc.open(str(tmp_path / "other"), create=True)
    other.models.save("net", {"weight": torch.zeros(2)}, step=1)
    with pytest.raises(ConfigError, match="artifact 'net' is net@1 of"):
        resolve(other, artifact)


def test_online_a_run_of_wandb_uses_the_splits_as_artifacts(wandb, repo):
    from datasvc.integrations.wandb import log_inputs

    save_trained(repo)
    used = []
    online = SimpleNamespace(
        offline=False, config=SimpleNamespace(update=lambda *_, **__: None), use_artifact=used.append
    )
    log_inputs(online, repo, "net@1")
    assert [(artifact.name, artifact.type) for artifact in used] == [("pets-v1-train", "dataset")]
    assert used[0].metadata["digest"] == repo.dataset("pets@1")["train"].digest
