"""Versions, comparisons and differences as a notebook shows them: HTML, tables and plots."""

import sys

import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.models import save
from datasvc.models.registry.compare import compare_versions
from datasvc.models.registry.diff import diff
from datasvc.models.registry.registry import describe_model, list_models, model_log
from tests.drawing.hostile import HOSTILE, parsed, text_of, with_class
from tests.models.entries import commit_entry


@pytest.fixture
def cnn(repository):
    commit_entry(repository, "base", step=9)
    commit_entry(
        repository, "cnn", step=100, parent="base@1", metrics={"acc": 0.5}, config={"lr": 1, "opt": {"m": 2}}
    )
    commit_entry(repository, "cnn", step=200, parent="cnn@1", metrics={"loss": 0.75}, config={"lr": "cosine"})
    commit_entry(repository, "cnn", step=300, parent="cnn@2", metrics={"acc": 0.75}, data=["pets@1"])
    repository.tag("models", "cnn@3", "prod")
    return repository


def test_a_log_is_a_graph_in_a_notebook(cnn):
    root = parsed(model_log(cnn, "cnn")._repr_html_())
    assert [text_of(node).split(",")[0] for node in with_class(root, "node")] == ["cnn@3", "cnn@2", "cnn@1"]
    assert "prod" in text_of(root)
    assert len(with_class(parsed(list_models(cnn)._repr_html_()), "node")) == 2


def test_a_log_is_a_table_with_metrics_and_settings(cnn):
    log = model_log(cnn, "cnn")
    table = log.to_arrow()
    assert table["version"].to_pylist() == ["cnn@1", "cnn@2", "cnn@3"]
    assert table["metrics.acc"].to_pylist() == [0.5, None, 0.75]
    assert table["config.opt.m"].to_pylist() == [2, None, None]
    assert table["config.lr"].to_pylist() == ["1", '"cosine"', None]
    assert table["data"].to_pylist() == [[], [], ["pets@1"]]
    assert list(log.to_pandas().columns) == table.column_names
    assert log.to_pandas()["step"].tolist() == [100, 200, 300]


def test_a_metric_is_plotted_over_steps(cnn):
    pytest.importorskip("matplotlib").use("Agg")
    ax = model_log(cnn, "cnn").plot("acc")
    (line,) = ax.lines
    assert line.get_xdata().tolist() == [100, 200, 300]
    assert [str(y) for y in line.get_ydata()] == ["0.5", "nan", "0.75"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "acc")
    with pytest.raises(
        ConfigError, match="no version has a number as the metric 'top1'; their metrics are: acc, loss"
    ):
        model_log(cnn, "cnn").plot("top1")


@pytest.mark.parametrize(
    ("package", "call"), [("matplotlib", lambda log: log.plot("acc")), ("pandas", lambda log: log.to_pandas())]
)
def test_a_missing_package_is_named_with_its_command(cnn, monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}, which is not installed: pip install '{package}>="):
        call(model_log(cnn, "cnn"))


def test_a_version_shows_its_metadata(cnn):
    shown = text_of(parsed(describe_model(cnn, "cnn@prod")._repr_html_()))
    for expected in ("cnn@3", "prod", "300", "pets@1/train", "acc 0.75"):
        assert expected in shown
    assert "NOT FINITE" not in shown


def test_a_comparison_is_a_table(cnn):
    comparison = compare_versions(cnn, ["cnn@1", "cnn@3"])
    frame = comparison.to_pandas().set_index("version")
    assert frame["metrics.acc"].to_dict() == {"cnn@1": 0.5, "cnn@3": 0.75}
    assert frame["step"].tolist() == [100, 300]
    assert "metrics.acc 0.5 0.75" in text_of(parsed(comparison._repr_html_()))


def test_a_difference_shows_values_and_the_tensors_that_changed_most(repository):
    for scale in (1.0, 1.5):
        state = {"model": {"a": torch.ones(4) * scale, "b": torch.ones(2), "c": torch.ones(3) + (scale > 1) * 0.1}}
        save(repository, "net", state, step=int(scale * 10), metrics={"loss": scale})
    root = parsed(diff(repository, "net@1", "net@2")._repr_html_())
    assert "1 equal, 2 changed" in text_of(root)
    assert "metrics.loss 1 1.5" in text_of(root)
    widths = [float(bar.get("width")) for bar in with_class(root, "bar")]
    assert widths[1] / widths[0] == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize("text", [text for text in HOSTILE if "\ud800" not in text and len(text) < 100])
def test_hostile_metadata_stays_text(repository, text):
    for step in (1, 2):
        commit_entry(
            repository, "cnn", step=step, message=text, metrics={text: step}, config={text: {text: text * step}}
        )
    log = model_log(repository, "cnn")
    for value in (
        log,
        log[0],
        compare_versions(repository, ["cnn@1", "cnn@2"], equal=True),
        diff(repository, "cnn@1", "cnn@2"),
    ):
        parsed(value._repr_html_())
