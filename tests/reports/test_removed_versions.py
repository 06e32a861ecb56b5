"""What a removed version lacks is no damage."""

import pytest
import torch

from datasvc.api.gc import gc, gc_at
from datasvc.errors import NotFoundError
from datasvc.models import save
from datasvc.models.registry.verify import every_version
from datasvc.models.registry.verify import verify as verify_models
from datasvc.models.search.query import find_versions
from datasvc.models.transfer.copy_datasets import transfer_datasets
from datasvc.models.transfer.copy_versions import transfer
from datasvc.repository import Repository
from datasvc.repository.removal import remove_versions
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import write_version


@pytest.fixture
def removed(repository):
    """A repository whose first versions were removed and swept at once; the second ones are whole."""
    for step in (1, 2):
        save(repository, "cnn", {"w": torch.full((40_000,), float(step))}, step=step)
        write_version(repository, "pets", {"train": [[{"key": f"{step}", "text": "x"}]]})
    remove_versions(repository, "models", ["cnn@1"])
    remove_versions(repository, "datasets", ["pets@1"])
    assert gc_at(repository, 2**33, grace_s=0, dry_run=False).objects
    return repository


def test_the_ordinary_gc_runs_after_one_without_a_grace_period(removed):
    """apache/iceberg#928, apache/iceberg#17715: a clean-up stops at the metadata of an expired version."""
    report = gc(removed, dry_run=False)
    assert report.objects == ()
    assert report.num_kept


@pytest.mark.parametrize(("kind", "name"), [("models", "cnn"), ("datasets", "pets")])
def test_a_missing_table_of_a_version_that_is_not_removed_stops_gc(removed, kind, name):
    """apache/iceberg#17715: what a kept version refers to is unknown then, so nothing may be deleted."""
    content = removed.versions(kind, name).read(2).content
    table = content["tensors"] if kind == "models" else content["splits"]["train"]["table"]
    removed.objects.local_path(table).unlink()
    with pytest.raises(NotFoundError, match="Nothing was deleted"):
        gc(removed, dry_run=False)


def test_the_other_versions_are_verified_found_and_sent(removed, tmp_path):
    """apache/iceberg#17715: a missing file of one version stops the work on all."""
    assert verify_models(removed, every_version(removed)).problems == ()
    assert verify(removed, "pets@2", deep=True).problems == ()
    assert [str(version) for version in find_versions(removed)] == ["cnn@2"]
    copy = Repository.create(str(tmp_path / "copy"))
    transfer(removed, copy, ["cnn"], with_parents=True)
    transfer_datasets(removed, copy, ["pets"], with_parents=True)
    assert copy.names("models") == ["cnn"]
    assert copy.names("datasets") == ["pets"]
