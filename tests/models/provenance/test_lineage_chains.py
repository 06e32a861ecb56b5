"""Chains of versions in a lineage."""

from datasvc.models.provenance.lineage import Lineage, ModelOrigin
from datasvc.models.provenance.lineage_chains import collapse_chains


def origin(name, *parents, data="pets@1/train", start=(0, 0), stop=(0, 8)):
    segment = {"version": name, "data": data, "table": "t", "start": list(start), "stop": list(stop)}
    return ModelOrigin(name, parents, None, 1, "", {}, {}, {}, (segment,) if data else (), (), ())


def lineage_of(*models):
    return Lineage(models[0].name, {model.name: model for model in models})


def test_a_run_of_a_thousand_versions_is_one_version_and_the_requested_one_stays():
    models = [
        origin(f"cnn@{n}", *([f"cnn@{n - 1}"] if n > 1 else []), start=(0, 8 * (n - 1)), stop=(0, 8 * n))
        for n in range(1000, 0, -1)
    ]
    short, chains = collapse_chains(lineage_of(*models))
    assert list(short.models) == ["cnn@1000", "cnn@999"]
    assert chains["cnn@999"][0::998] == ["cnn@999", "cnn@1"]
    (segment,) = short.models["cnn@999"].consumed
    assert (segment["start"], segment["stop"]) == ([0, 0], [0, 7992])
    assert short.models["cnn@999"].parents == ()


def test_forks_merges_other_data_and_other_models_end_a_chain():
    models = [
        origin("cnn@6", "cnn@5", "cnn@4"),
        origin("cnn@5", "cnn@3"),
        origin("cnn@4", "cnn@3"),
        origin("cnn@3", "cnn@2"),
        origin("cnn@2", "cnn@1", data="birds@1/train"),
        origin("cnn@1", "base@1", data="birds@1/train"),
        origin("base@1", data=None),
    ]
    short, chains = collapse_chains(lineage_of(*models))
    assert chains == {
        "cnn@6": ["cnn@6"], "cnn@5": ["cnn@5"], "cnn@4": ["cnn@4"], "cnn@3": ["cnn@3"], "cnn@2": ["cnn@2", "cnn@1"],
        "base@1": ["base@1"],
    }  # fmt: skip
    assert short.models["cnn@3"].parents == ("cnn@2",)
    assert short.models["cnn@2"].parents == ("base@1",)


def test_every_parent_of_a_collapsed_lineage_is_in_it():
    models = [origin("cnn@4", "cnn@3"), origin("cnn@3", "cnn@2"), origin("cnn@2", "cnn@1"), origin("cnn@1")]
    short, _ = collapse_chains(lineage_of(*models))
    assert all(parent in short.models for model in short.models.values() for parent in model.parents)
