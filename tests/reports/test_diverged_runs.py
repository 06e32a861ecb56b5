"""Training that diverges: the loss or the weights become NaN or infinite."""

import json

import pytest
import torch

import datasvc
from datasvc.errors import ConfigError, NotFiniteError
from datasvc.runs import RunLog, read_run
from datasvc.shards import ingest
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train
from datasvc.views.run_words import warnings
from tests.ui.conftest import running_ui


@pytest.fixture(scope="module")
def url(digits_folder, tmp_path_factory):
    repo = datasvc.open(str(tmp_path_factory.mktemp("diverged") / "repo"), create=True)
    ingest(repo.repository, str(digits_folder / "val"), "digits", val_fraction=0.1)
    return repo.repository.url


def run(url, name, capsys, *, max_steps, **settings):
    """Train; return the events by name, and what is said on stderr."""
    defaults = {"data": "digits", "size": 16, "batch_size": 32, "epochs": 3, "checkpoint_every": 2}
    train(TrainConfig(repo=url, name=name, max_steps=max_steps, **{**defaults, **settings}))
    said = capsys.readouterr()

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in said.out.splitlines()], said.err


def is_finite(url, ref):
    state = datasvc.open(url).models.restore(ref).state["model"]
    return all(bool(value.isfinite().all()) for value in state.values() if torch.is_tensor(value))


def test_a_run_that_diverges_says_so_and_is_continued_from_the_newest_version_with_finite_weights(url, capsys):
    """skinniderlab/CLM#284, Rikorose/DeepFilterNet#30: training goes on with NaN, also after a restart."""
    run(url, "net", capsys, max_steps=2)
    events, said = run(url, "net", capsys, max_steps=6, learning_rate=1e30)
    reports = [event for event in events if event["event"] == "not_finite"]
    assert len(reports) == 1
    assert f"since step {reports[0]['step']}" in said
    assert "net@3 is of no use" in said
    assert [is_finite(url, f"net@{number}") for number in (1, 2, 3)] == [True, False, False]
    assert events[-1]["event"] == "end"

    _, said = run(url, "net", capsys, max_steps=4)
    assert (
        "net@3 has weights that are NaN or infinite; the run continues net@1, of step 2; give --resume net@3" in said
    )
    models = datasvc.open(url).models
    newest = models.versions("net")[-1]
    entry = models.restore(str(newest)).entry
    assert (entry["parent"], entry["step"], is_finite(url, str(newest))) == ("net@1", 4, True)
    _, said = run(url, "net", capsys, max_steps=7, resume="net@3")
    assert "net@3 has weights that are NaN or infinite; the run continues net@3, of step 6" in said


def test_a_run_may_end_with_an_error_before_it_saves_what_has_diverged(url, capsys):
    """mlfoundations/open_lm#7, keras-team/keras#6456: checkpoints of a diverged run are what a restart continues."""
    run(url, "stopped", capsys, max_steps=2)
    with pytest.raises(NotFiniteError, match="--stop-on-nan ends the run; its newest version is stopped@1"):
        run(url, "stopped", capsys, max_steps=9, learning_rate=1e30, stop_on_nan=True, report_every=100)
    with pytest.raises(NotFiniteError, match="the loss is nan, which is not finite after step"):
        run(url, "stopped", capsys, max_steps=9, learning_rate=1e30, stop_on_nan=True, checkpoint_every=100)
    assert [version.version for version in datasvc.open(url).models.versions("stopped")] == [1]


def test_a_model_whose_versions_have_all_diverged_is_not_continued_by_itself(url, capsys):
    """NVlabs/neuralangelo#21: the loss is NaN from the first step after a restart."""
    run(url, "lost", capsys, max_steps=3, learning_rate=1e30)
    with pytest.raises(ConfigError, match="no other version of lost has finite ones; give --resume never"):
        run(url, "lost", capsys, max_steps=9)


def test_a_step_that_a_loss_scale_skips_is_no_divergence(url, capsys, monkeypatch):
    """horovod/horovod#1699: half precision overflows in some steps, which are skipped."""
    from datasvc.trainer.recipes.tasks.classification import Classification

    real, calls = Classification.sum_loss, []

    def overflow_once(self, model, examples):
        calls.append(None)
        return real(self, model, examples) * (float("inf") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(Classification, "sum_loss", overflow_once)
    events, said = run(url, "scaled", capsys, max_steps=4, precision="fp16", stop_on_nan=True)
    assert [event["loss"] for event in events if event["event"] == "step"][1] == "inf"
    assert "diverged" not in said


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_run_with_a_loss_that_is_not_finite_is_a_problem_of_all_pages_and_of_the_command_once(tmp_path, loss):
    """skinniderlab/CLM#284: Home found no problem while the newest run had trained with NaN to its end."""
    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    with RunLog.open(repository, "sound") as sound:
        sound.report("step", step=2, loss=loss)
        sound.report("step", step=4, loss=0.5)  # a step whose loss overflowed, and was skipped
    with RunLog.open(repository, "lost") as log:
        log.report("step", step=2, loss=loss)
    text = f"has diverged: its newest loss is {loss}"
    assert [found.startswith(text) for found in warnings(read_run(repository, "lost", log.id))] == [True]
    assert warnings(read_run(repository, "sound", sound.id)) == []
    with running_ui(tmp_path / "repo", thumbnails=tmp_path / "t") as pages:
        for path in ("/", "/runs", f"/runs/lost/{log.id}"):
            problems = [(found["severity"], found["text"]) for found in pages.json(path, "problems")]
            assert [(severity, text in found) for severity, found in problems] == [("error", True)]
