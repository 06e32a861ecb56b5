import sys
import types

import pytest

from datasvc.errors import ConfigError
from trainer.recipes.metric_logs import open_logs

CONFIG = {"epochs": 3, "model": "small-cnn"}


class Recorder(types.ModuleType):
    """Stands for a tracker's package: notes which of its functions were called with what."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return call


def write(target):
    (log,) = open_logs([target], name="m", config=CONFIG, step=5)
    log.log(6, {"loss": 0.5})
    log.close()


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
    write("wandb:project")
    assert wandb.calls == [
        ("init", (), {"project": "project", "name": "m", "config": CONFIG}),
        ("log", ({"loss": 0.5},), {"step": 6}),
        ("finish", (), {}),
    ]


def test_mlflow_gets_configuration_values_and_the_end(monkeypatch):
    mlflow = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    write("mlflow:experiment")
    assert [name for name, _, _ in mlflow.calls] == [
        "set_experiment",
        "start_run",
        "log_params",
        "log_metrics",
        "end_run",
    ]
    assert mlflow.calls[3] == ("log_metrics", ({"loss": 0.5},), {"step": 6})


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_says_how_to_install_it(kind, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=rf"pip install 'datasvc\[{kind}\]'"):
        write(f"{kind}:{tmp_path}")
