"""`datasvc models trained-on | lineage` as a user runs them."""

import pytest

from datasvc.shards import open_dataset
from datasvc.shards.versions.delete import delete
from tests.cli.test_cli import datasvc, said
from tests.loaders.numbered import sample_of
from tests.models.trainings import Run, Truth
from tests.shards.written_versions import LABELLED_SCHEMA, write_version


@pytest.fixture
def trained(repository):
    """`pets@1`, of which `pets@2` deleted sample 4; `cnn@1` to `cnn@3`, one epoch of nine steps all in all."""
    samples = [sample_of(number, LABELLED_SCHEMA) for number in range(9)]
    write_version(repository, "pets", {"train": [samples]}, LABELLED_SCHEMA)
    delete(repository, "pets@1", keys=["4"])
    truth = Truth()
    run = Run(repository, truth, "cnn", open_dataset(repository, "pets@1")["train"])
    run.train(2), run.save(), run.train(2), run.save(), run.train(1), run.save()
    return repository, truth


def test_versions_that_read_a_deleted_sample_are_listed_with_epoch_and_step(trained):
    repository, truth = trained
    ((key, data, epoch, position, step), version), = [
        (event, name) for name, own in truth.own.items() for event in own if event[0] == "4" and event[2] == 0
    ]  # fmt: skip
    done = datasvc("models", "trained-on", "cnn", "--deleted-in", "pets@2", repo=repository.url)
    assert done.returncode == 0, done.stderr
    assert f"{version}: epoch {epoch}, step {step}, position {position} of {data}" in done.stdout
    found = said(datasvc("models", "trained-on", "--sample", "4", "--sample", "x", "--json", repo=repository.url))
    assert found["missing"] == ["x"]
    assert {
        "key": key, "data": data, "version": version, "epoch": epoch, "position": position, "step": step,
        "is_certain": True,
    } in found["consumed"]  # fmt: skip
    numbers = [each["samples"] for each in found["versions"]]
    assert numbers == [int(name >= version) for name in ("cnn@1", "cnn@2", "cnn@3")]
    refused = datasvc("models", "trained-on", "cnn", repo=repository.url)
    assert (refused.returncode, "give the samples with --sample KEY" in refused.stderr) == (2, True)


def test_lineage_goes_down_to_the_source(trained):
    repository, _ = trained
    done = datasvc("models", "lineage", "cnn@3", "--shards", repo=repository.url)
    assert done.returncode == 0, done.stderr
    table = open_dataset(repository, "pets@1")["train"].table
    for part in ("cnn@3 to cnn@2, 2 versions", "continues cnn@1", "pets@1: ingested from test memory; train 9"):
        assert part in done.stdout
    assert table.shard(0).digest in done.stdout
    found = said(datasvc("models", "lineage", "cnn@3", "--json", repo=repository.url))
    assert [each["name"] for each in found["models"]] == ["cnn@3", "cnn@2", "cnn@1"]
