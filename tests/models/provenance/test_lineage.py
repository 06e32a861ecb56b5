"""Where a version came from: every version, revision, data set, shard and source above it."""

import json

import torch

from datasvc.models import CodeRevision, ConsumptionTracker, DataUse, describe_environment, read_lineage, save
from datasvc.models.provenance.lineage import Lineage, ModelOrigin, collapse_chains
from datasvc.models.versions import code_revision
from datasvc.shards import ingest, open_dataset
from datasvc.shards.history.revert import revert
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from tests.loaders.numbered import Numbers
from tests.models.trainings import commit


def test_lineage_leads_to_shards_and_sources_through_versions_and_what_data_was_made_from(repository, folder):
    ingest(repository, str(folder), "pets", shard_bytes=4000)
    key = open_dataset(repository, "pets@1")["train"][0]["key"]
    delete(repository, "pets@1", keys=[key])
    ingest(repository, str(folder), "more", shard_bytes=4000)
    merge(repository, ["pets@2", "more@1"], "all", on_common="first")
    split = open_dataset(repository, "all@1")["train"]
    loader = Numbers(split, 4, tail="drop", prefetch=0, blob="image")
    reading, code = ConsumptionTracker(loader), CodeRevision("abc", dirty=False)
    versions = []
    for step in (0, 0):
        versions.append(
            save(
                repository, "cnn", {"w": torch.ones(2)}, step=step, data=[reading.use()], code=code,
                parent=str(versions[-1]) if versions else None,
            )
        )  # fmt: skip
    evaluated = DataUse("pets@1", "val", {}, purpose="evaluation")
    commit(repository, "tuned", 0, [reading.use(), evaluated], parent="cnn@2", merged=["cnn@1"])
    use = reading.use().to_dict()
    use["spans"][0]["stop"] = [1, 0]
    commit(repository, "tuned", 4, [use], parent="tuned@1")

    found = read_lineage(repository, "tuned@2")
    assert list(found.models) == ["tuned@2", "tuned@1", "cnn@2", "cnn@1"]
    assert [each.parents for each in found.models.values()] == [("tuned@1",), ("cnn@2", "cnn@1"), ("cnn@1",), ()]
    assert found.models["cnn@1"].code["revision"] == "abc"
    assert found.models["cnn@1"].environment["packages"]["torch"] == torch.__version__
    assert found.models["tuned@1"].evaluated == ("pets@1/val",)
    assert found.datasets["all@1"].parents == ("pets@2", "more@1")
    assert found.datasets["pets@2"].change == {"kind": "delete", "deleted": 1}
    assert found.datasets["pets@1"].source["url"] == str(folder)
    assert found.datasets["pets@1"].source["options"]["shard_bytes"] == 4000
    assert found.shards == {split.digest: [shard.digest for shard in split.table.shards()]}
    assert found.gaps == []
    json.dumps(found.to_dict())


def test_data_that_was_reverted_leads_to_the_version_that_it_is_equal_to(repository, folder):
    ingest(repository, str(folder), "pets", shard_bytes=4000)
    delete(repository, "pets", keys=[open_dataset(repository, "pets@1")["train"][0]["key"]])
    revert(repository, "pets@1")
    split = open_dataset(repository, "pets@3")["train"]
    tracker = ConsumptionTracker(Numbers(split, 4, tail="drop", prefetch=0, blob="image"))
    use = tracker.use().to_dict()
    use["spans"][0]["stop"] = [1, 0]
    commit(repository, "cnn", 4, [use])
    found = read_lineage(repository, "cnn")
    assert found.datasets["pets@3"].parents == ("pets@2", "pets@1")


def test_data_that_is_not_here_is_named(repository):
    state = {
        "format": 1, "version": "cd" * 32, "epoch": 0, "position": 4, "seed": 0, "shuffle": "global", "lanes": 1,
        "block": None, "sticky": False,
    }  # fmt: skip
    commit(repository, "cnn", 1, [DataUse("gone@4", "train", state)], parent="base@2")
    found = read_lineage(repository, "cnn")
    assert "continues 'base@2', which is not in this repository" in found.models["cnn@1"].gaps[0]
    assert any("data-set version gone@4 is not in this repository" in gap for gap in found.gaps)
    assert any(f"shard table {'cd' * 32} of gone@4/train is not in this repository" in gap for gap in found.gaps)


def test_the_environment_names_versions_and_no_machine():
    import platform

    told = describe_environment(world_size=8)
    assert told["packages"]["torch"] == torch.__version__
    assert (told["world_size"], told["python"]) == (8, platform.python_version())
    assert "hostname" not in told
    assert platform.node() not in json.dumps(told)
    assert describe_environment(hostname=True)["hostname"] == platform.node()


def test_the_driver_and_gpus_are_told_without_touching_them(tmp_path, monkeypatch):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (builder@host)\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    for number in range(2):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 90\n")
    monkeypatch.setattr(code_revision, "_PROC", tmp_path)
    told = code_revision.describe_environment()
    assert (told["driver"], told["gpus"]) == ("575.57.08", {"NVIDIA H200": 2})


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
