"""The lineage as a graph from left to right."""

from dataclasses import replace

from datasvc.models.provenance.lineage import DataOrigin, Lineage, ModelOrigin
from datasvc.views.provenance import lineage_flow
from tests.drawing.hostile import parsed, text_of, with_class


def data_origin(name, *parents, table, **facts):
    split = {"table": table, "samples": 5, "shards": 2, "bytes": 9}
    return DataOrigin(name, parents, None, "", facts.get("source", {}), facts.get("change", {}), {"train": split})


def model_origin(name, *parents, consumed=(), evaluated=()):
    return ModelOrigin(name, parents, None, 5, "", {}, {}, {}, consumed, evaluated, ())


def pets_lineage(source="s3://pets"):
    read = {"data": "pets@2/train", "table": "t2", "start": [0, 0], "stop": [3, 1200]}
    lineage = Lineage("cnn@2", shards={"t1": ["a"], "t2": ["a", "b"]}, gaps=["the weights of x@1 are <unknown>"])
    lineage.datasets = {
        "pets@2": data_origin("pets@2", "pets@1", table="t2", change={"kind": "append"}),
        "pets@1": data_origin("pets@1", table="t1", source={"kind": "image-folder", "url": source}),
    }
    lineage.models = {
        "cnn@2": model_origin("cnn@2", "cnn@1", consumed=[read], evaluated=["tests@1/val"]),
        "cnn@1": model_origin("cnn@1"),
    }
    return lineage


def test_sources_shards_data_and_models_follow_each_other():
    nodes, edges = lineage_flow(pets_lineage(), href=lambda kind, name: f"/{kind}/{name}")
    ends = {(edge.source, edge.target): edge.label for edge in edges}
    assert ends == {
        ("source:image-folder:s3://pets", "datasets:pets@1"): "ingest",
        ("shards:t1", "datasets:pets@1"): "shards of train",
        ("shards:t2", "datasets:pets@2"): "shards of train",
        ("datasets:pets@1", "datasets:pets@2"): "append",
        ("models:cnn@1", "models:cnn@2"): "continued",
        ("datasets:pets@2", "models:cnn@2"): "train: from epoch 0, position 0, to epoch 3, position 1,200",
        ("datasets:tests@1", "models:cnn@2"): "evaluated on it",
    }
    assert {node.label: node.href for node in nodes}["pets@2"] == "/datasets/pets@2"
    assert {node.label: node.column for node in nodes}["2 shards of train"] == 1


def test_a_run_stands_between_its_data_and_its_versions():
    lineage = pets_lineage()
    lineage.models["cnn@2"] = replace(lineage.models["cnn@2"], run="cnn/20261123-221830-3fa9c1")
    nodes, edges = lineage_flow(lineage, href=lambda kind, name: f"/{kind}/{name}")
    ends = {(edge.source, edge.target) for edge in edges}
    run = "run:cnn/20261123-221830-3fa9c1"
    assert {("datasets:pets@2", run), (run, "models:cnn@2")} < ends
    assert ("datasets:pets@2", "models:cnn@2") not in ends
    assert {node.name: node.href for node in nodes}[run] == "/runs/cnn/20261123-221830-3fa9c1"


def test_a_lineage_in_a_notebook_has_the_graph_and_what_is_not_known():
    root = parsed(pets_lineage("javascript:alert('<script>')")._repr_html_())
    assert len(with_class(root, "node")) == 8
    assert "the weights of x@1 are <unknown>" in text_of(root)


def test_a_run_of_a_thousand_saves_is_one_node_in_a_notebook():
    lineage = Lineage("cnn@1000")
    lineage.models = {
        f"cnn@{number}": model_origin(f"cnn@{number}", *([f"cnn@{number - 1}"] if number > 1 else []))
        for number in range(1000, 0, -1)
    }
    nodes = with_class(parsed(lineage._repr_html_()), "node")
    assert [text_of(node) for node in nodes][1:] == ["cnn@999 to cnn@1 cnn@1 to @999 999 versions"]
