"""A repository on the emulators of Azure Blob Storage and Google Cloud Storage, from ingest to gc."""

import secrets

import pytest
import torch

from datasvc.api.gc import gc
from datasvc.models import restore, save
from datasvc.models.transfer import transfer_datasets
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.versions.verify import verify


def digests(repository, ref):
    return {name: split.digest for name, split in open_dataset(repository, ref).items()}


@pytest.mark.slow
@pytest.mark.parametrize("store", ["azure_container", "google_bucket"])
def test_a_repository_there_has_what_a_local_one_has(store, request, repository, folder):
    there = Repository.create(f"{request.getfixturevalue(store)}/{secrets.token_hex(8)}")
    for each, workers in ((repository, 1), (there, 2)):
        ingest(each, str(folder), "pets", shard_bytes=4000, workers=workers)
    assert digests(there, "pets") == digests(repository, "pets")
    there.tag("datasets", "pets@1", "stable")
    assert not verify(there, "pets@stable", deep=True).problems
    state = {"w": torch.arange(3_000_000.0)}
    save(there, "net", state, step=1)
    assert torch.equal(restore(there, "net").state["w"], state["w"])
    assert gc(there).objects == ()
    assert transfer_datasets(there, repository, ["pets"], name="copy").num_objects == 0
