import struct
import sys
import types

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.reporting.metric_logs import open_logs

CONFIG = {"epochs": 3, "model": "small-cnn"}


class Recorder(types.ModuleType):
    """Stands for a tracker's package: notes which of its functions were called with what."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []
        self.id = "run-7"
        self.info = types.SimpleNamespace(run_id="run-7", experiment_id="1")
        self.experiment_id = "1"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return call


def write(target, run_id=None, step=6):
    run_ids = {} if run_id is None else {target.partition(":")[0]: run_id}
    (log,) = open_logs([target], name="m", config=CONFIG, step=step - 1, run_ids=run_ids).values()
    log.log(step, {"loss": 0.5})
    log.close()
    return log.run_id


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(f"tensorboard:{tmp_path}")
    events = EventAccumulator(str(tmp_path / "m")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(6, 0.5)]
    assert "epochs = 3" in str(events.Tensors("config/text_summary")[0])


def test_weights_and_biases_gets_configuration_values_and_the_end(monkeypatch):
    wandb = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert write("wandb:project") == "run-7"
    first = ("init", (), {"project": "project", "name": "m", "config": CONFIG})
    rest = [("log", ({"loss": 0.5},), {"step": 6}), ("finish", (), {})]
    assert wandb.calls == [first, *rest]
    wandb.calls.clear()
    write("wandb:project", "run-7")
    name, _, options = wandb.calls[0]
    assert (name, options) == ("init", {**first[2], "id": "run-7", "resume": "allow", "allow_val_change": True})
    assert wandb.calls[1:] == rest


def test_mlflow_gets_configuration_values_and_the_end(monkeypatch):
    mlflow = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert write("mlflow:experiment") == "run-7"
    assert [name for name, _, _ in mlflow.calls] == [
        "set_experiment",
        "start_run",
        "log_params",
        "log_metrics",
        "end_run",
    ]
    assert mlflow.calls[3] == ("log_metrics", ({"loss": 0.5},), {"step": 6})
    mlflow.calls.clear()
    write("mlflow:experiment", "run-7")
    assert mlflow.calls[2] == ("start_run", (), {"run_id": "run-7"})
    assert [name for name, _, _ in mlflow.calls][1:] == ["get_run", "start_run", "log_metrics", "end_run"]


def wandb_records(folder):
    """What a run without a network has left on the disk: after seven bytes, records of checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, offset = path.read_bytes(), 7
    while offset < len(data):
        start = offset + 7
        (length,) = struct.unpack_from("<H", data, offset + 4)
        offset = start + length
        yield Record.FromString(data[start:offset])


@pytest.mark.slow
def test_the_real_weights_and_biases_keeps_what_was_written(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    write("wandb:project")
    # A process of its own writes the file, and is waited for when this one ends.
    wandb.teardown()
    records = list(wandb_records(tmp_path))
    run = next(record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name) == ("project", "m")
    config = {update.key: update.value_json for update in run.config.update}
    assert (config["epochs"], config["model"]) == ("3", '"small-cnn"')
    (point,) = [record.history for record in records if record.HasField("history")]
    values = {item.key or item.nested_key[0]: item.value_json for item in point.item}
    assert (values["loss"], values["_step"]) == ("0.5", "6")
    assert any(record.HasField("exit") for record in records)


@pytest.fixture
def mlflow(monkeypatch, tmp_path, without_an_experiment):
    """The real one, on a folder."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tmp_path.as_uri())
    yield mlflow
    mlflow.set_tracking_uri(before)


@pytest.mark.slow
def test_the_real_mlflow_keeps_what_was_written(mlflow):
    write("mlflow:experiment")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert (run.info.run_name, run.info.status) == ("m", "FINISHED")
    assert run.data.params == {"epochs": "3", "model": "small-cnn"}
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")] == [(6, 0.5)]
    assert write("mlflow:experiment", run.info.run_id, step=7) == run.info.run_id
    (same,) = client.search_runs([run.info.experiment_id])
    assert [point.step for point in client.get_metric_history(same.info.run_id, "loss")] == [6, 7]
    assert write("mlflow:another", run.info.run_id) != run.info.run_id
    client.delete_run(run.info.run_id)
    with pytest.raises(ConfigError, match=f"cannot continue run {run.info.run_id} of 'experiment'"):
        write("mlflow:experiment", run.info.run_id)


@pytest.mark.slow
def test_what_the_real_mlflow_refuses_is_an_error_of_ours(mlflow):
    mlflow.MlflowClient().delete_experiment(mlflow.create_experiment("gone"))
    with pytest.raises(ConfigError, match="mlflow cannot start a run of 'gone': Cannot set a deleted experiment"):
        write("mlflow:gone")


@pytest.mark.slow
def test_what_the_real_weights_and_biases_refuses_is_an_error_of_ours(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="wandb cannot start a run of 'a/b'"):
        write("wandb:a/b")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_says_how_to_install_it(kind, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=rf"pip install '{kind}(-skinny)?>="):
        write(f"{kind}:{tmp_path}")
