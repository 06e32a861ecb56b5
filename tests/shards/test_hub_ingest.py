"""Sources on the Hugging Face Hub, `hf://`: a stand-in of its HTTP API on loopback, read by its own client."""

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import NotFoundError
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources.common.listing import list_files
from tests.samples import class_sorted, write_folder, write_tars
from tests.shards.hub_server import TOKEN, HubServer

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with no repository yet, and one private name."""
    server = HubServer(tmp_path / "hub", private=("lab/secret",)).start()
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.url, "token": False})
    for name, value in {"ENDPOINT": server.url, "TOKEN": "false"}.items():
        monkeypatch.setenv(f"FSSPEC_HF_{name}", value)  # of the workers
    yield server
    server.close()
    huggingface_hub.HfFileSystem.clear_instance_cache()


def write_parquet(folder, rows=40):
    folder.mkdir(parents=True)
    for number in range(2):
        table = pa.table({"text": [f"text {number} {row}" for row in range(rows)], "n": list(range(rows))})
        pq.write_table(table, folder / f"train-{number:05d}-of-00002.parquet", row_group_size=10)
    return folder


def digests(repository, ref):
    return {name: split.digest for name, split in open_dataset(repository, ref).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_folder(folder, {"train": {"a": 5, "b": 4}, "val": {"a": 3}}),
        lambda folder: write_tars(folder, class_sorted(30, 3), per_tar=12),
        write_parquet,
    ],
    ids=["images", "tars", "parquet"],
)
def test_a_source_on_the_hub_gives_the_digests_of_a_local_one(hub, repository, write):
    local = write(hub.folder / "lab" / "pets")
    ingest(repository, str(local), "local")
    for name, url in {"here": "hf://datasets/lab/pets", "pinned": "hf://datasets/lab/pets@main"}.items():
        ingest(repository, url, name)
        assert digests(repository, name) == digests(repository, "local")
    assert any(path.startswith("/content/") for _, path in hub.requests)


@pytest.mark.slow
def test_workers_read_from_the_hub(hub, repository):
    local = write_tars(hub.folder / "lab" / "pets", class_sorted(30, 3), per_tar=12)
    ingest(repository, str(local), "local", shard_bytes=6000)
    ingest(repository, "hf://datasets/lab/pets", "there", shard_bytes=6000, workers=2)
    assert digests(repository, "there") == digests(repository, "local")


@pytest.mark.slow
def test_patterns_and_single_files_of_the_hub_are_sources(hub, repository):
    write_parquet(hub.folder / "lab" / "pets" / "data")
    for name, url in {
        "pattern": "hf://datasets/lab/pets/data/train-*.parquet",
        "folder": "hf://datasets/lab/pets",
    }.items():
        assert ingest(repository, url, name).num_samples == {"train": 80}
    one = ingest(repository, "hf://datasets/lab/pets/data/train-00000-of-00002.parquet", "one")
    assert one.num_samples == {"train": 40}


def test_a_file_that_changed_on_the_hub_has_another_stamp(hub):
    """What an interrupted ingest has stored of a file is used again only if the stamp is that of before."""
    file = hub.folder / "lab" / "pets" / "a.jsonl"
    file.parent.mkdir(parents=True)
    stamps = set()
    for content in ('{"n": 1}\n', '{"n": 2}\n'):
        file.write_text(content)
        huggingface_hub.HfFileSystem.clear_instance_cache()  # as in another process
        stamps.add(list_files("hf://datasets/lab/pets")[0].stamp)
    assert len(stamps) == 2
    assert "" not in stamps


def test_a_missing_dataset_of_the_hub_is_not_found_and_the_error_names_the_token(hub, repository):
    with pytest.raises(NotFoundError, match=r"hf://datasets/lab/none.*private.*HF_TOKEN"):
        ingest(repository, "hf://datasets/lab/none", "x")
    write_parquet(hub.folder / "lab" / "pets")
    with pytest.raises(NotFoundError, match="hf://datasets/lab/pets@v2"):
        ingest(repository, "hf://datasets/lab/pets@v2", "x")


def test_a_private_repository_is_read_with_a_token(hub, repository, monkeypatch):
    write_parquet(hub.folder / "lab" / "secret")
    with pytest.raises(NotFoundError, match="HF_TOKEN"):
        ingest(repository, "hf://datasets/lab/secret", "x")
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.url, "token": TOKEN})
    assert ingest(repository, "hf://datasets/lab/secret", "x").num_samples == {"train": 80}
