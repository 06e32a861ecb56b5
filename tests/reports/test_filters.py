"""A filter selects what was asked for: in pages, tables, commands and deletions."""

import json
from urllib.parse import quote

import pytest

import datasvc
from datasvc.testing import small_dataset
from tests.cli.command import run
from tests.ui.conftest import running_ui


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """Data with the classes class 0 to class 3, in two splits."""
    repo = datasvc.open(str(tmp_path_factory.mktemp("filters") / "repo"), create=True)
    small_dataset(repo, "pets", splits={"train": 40, "val": 8})
    return repo


@pytest.fixture(scope="module")
def ui(repo):
    with running_ui(repo.repository.url) as server:
        yield server


@pytest.mark.parametrize(
    "query", ["where=labl%3D1", "where=label%3D", "order=nothing", "key=none", "where=key::int=1"]
)
def test_a_filter_that_fails_shows_no_sample_at_all(ui, query):
    """caido/caido#964, iommirocks/iommi#561: an invalid filter was ignored, and all rows passed for its result."""
    panels = ui.json(f"/datasets/pets@1/samples/train?{query}")
    assert panels["problems"]
    assert panels["samples"]["samples"] == []
    html = ui.get(f"/datasets/pets@1/samples/train?{query}")[2]
    assert "/image/image" not in html
    assert "<h1>pets@1 train</h1>" in html


def test_a_class_is_found_by_its_name_in_every_condition(repo, ui):
    """doccano/doccano#1941: people filter by the name of the label that they see, not by its number."""
    where = "class = 'class2' and width > 3"
    expected = [sample["key"] for sample in repo.dataset("pets@1")["train"] if sample.class_name == "class2"]
    options = ["pets@1", "--split", "train", "--where", where, "--repo", repo.repository.url, "--json"]
    shown = ui.json(f"/datasets/pets@1/samples/train?where={quote(where)}", "samples")["samples"]
    query = f"select key from train where {where}"
    assert [each["key"] for each in shown] == expected
    assert [each["key"] for each in json.loads(run("head", *options).stdout)] == expected
    assert [each["key"] for each in json.loads(run("samples", *options).stdout)["samples"]] == expected
    assert [each["key"] for each in json.loads(run("sql", "pets@1", query, *options[-3:]).stdout)] == expected
    deleted = json.loads(run("delete", "--dry-run", "pets@1", *options[1:]).stdout)
    assert deleted["deleted"] == {"train": len(expected)}
    counted = json.loads(run("histogram", "pets@1", "class", *options[1:]).stdout)
    assert [(bar["label"], bar["count"]) for bar in counted["bins"]] == [("class2", len(expected))]


def test_a_column_that_is_named_class_stays_what_it_is(tmp_path):
    """The neighbour of the fault above: data may have a column `class` of their own."""
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    rows = [{"key": f"k{number}", "label": number % 2, "Class": number} for number in range(6)]
    repo.datasets.ingest(rows, "rows")
    repo.datasets.name_classes("rows", ["even", "odd"])
    assert [sample.key for sample in repo.datasets.head("rows", where="class = 3")] == ["k3"]
