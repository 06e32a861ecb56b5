"""A fact that a value describes once is on the terminal, in the notebook, in the report and on the page."""

import re

import pytest

from datasvc.models.registry.registry import describe_model
from datasvc.runs import RunLog, read_run
from datasvc.views import models, run_words
from datasvc.views.view import FactPart, fact, fact_texts, references
from tests.cli.command import run
from tests.drawing.hostile import parsed, text_of
from tests.models.entries import commit_entry
from tests.ui.conftest import running_ui, texts


@pytest.fixture
def logged(repository):
    with RunLog.open(repository, "cnn", data=["pets@1"], parent="base@3") as log:
        log.report("step", step=1200, loss=1.0)
    return log


def page_texts(repository, path):
    with running_ui(repository.url) as server:
        return " ".join(re.sub(r"<[^>]*>", " ", texts(server.get(path)[2])).split())


def test_facts_of_a_model_version_are_equal_everywhere(repository):
    commit_entry(
        repository,
        "cnn",
        step=1200,
        run="cnn/20261123-221830-3fa9c1",
        metrics={"acc": 0.5},
        data=["pets@1"],
        data_state={"epoch": 2},
    )
    version = describe_model(repository, "cnn@1")
    described = fact_texts(models.describe(version))
    page, notebook = page_texts(repository, "/models/cnn@1"), text_of(parsed(version._repr_html_()))
    terminal = run("models", "show", "cnn@1", "--repo", repository.url).stdout
    for name in ("step", "epoch", "run", "code"):
        assert f"{name} {described[name]}" in page
        assert f"{name} {described[name]}" in notebook
        assert f"{name}: {described[name]}\n" in terminal
    assert described["step"] == "1,200"
    assert described["epoch"] == str(version.to_dict()["data"][0]["state"]["epoch"])  # as in the JSON


def test_facts_of_a_run_are_equal_everywhere(repository, logged):
    history = read_run(repository, "cnn", logged.id)
    described = fact_texts(run_words.facts(history))
    page = page_texts(repository, f"/runs/cnn/{logged.id}")
    terminal = run("runs", "show", logged.ref, "--repo", repository.url).stdout
    documents = [text_of(parsed(history._repr_html_())), " ".join(texts(history.to_html()).split())]
    for name in ("state", "step", "data", "parent", "host"):
        assert f"{name}: {described[name]}\n" in terminal
        for text in (page, *documents):
            assert f"{name} {described[name]}" in text


def test_what_is_not_known_is_left_out():
    known = fact("size", FactPart(1500, "bytes"), " of ", FactPart(3, "number"))
    assert fact_texts([known, fact("run", None), fact("parent", *references("models", []))]) == {
        "size": "1.50 kB of 3"
    }
