"""A folder that somebody has sent may have links to private files of its reader, or none to be opened at all."""

import io
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from datasvc.cache import Cache
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.models.interop.artefact_files import attach
from datasvc.models.interop.importing import import_model
from datasvc.models.interop.safetensors_files import write_safetensors
from datasvc.models.restoring.fit import TensorSpec
from datasvc.shards.ingestion.ingest import ingest
from tests.models.interop.conftest import readers, shared_reader  # noqa: F401 - fixtures
from tests.samples import jpeg

_SECRET = b'{"token": "a private file of the reader"}'
_WEIGHT = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "private" / "token.json"
    path.parent.mkdir()
    path.write_bytes(_SECRET)
    return path


def _write_weights(path):
    write_safetensors(path, {"w": TensorSpec("float32", (2, 3))}, lambda _: {"w": _WEIGHT})


def _stored_files(repository):
    entry = repository.entries("models", "m")[-1].content
    files = entry["imported"].get("files", {})
    return {name: repository.objects.read(digest) for name, digest in files.items()}


def test_a_link_in_somebodys_model_folder_does_not_put_a_private_file_into_the_repository(repository, folder, secret):
    """libgit2/pygit2#614: a link in a published folder gives away what it leads to; only links below are safe."""
    model = folder / "model"
    (model / "below").mkdir(parents=True)
    _write_weights(model / "model.safetensors")
    (model / "config.json").write_bytes(b'{"model_type": "tiny"}')
    (model / "below" / "vocab.txt").write_bytes(b"a b")
    (model / "tokenizer.json").symlink_to(secret)
    (model / "merges.txt").symlink_to(os.path.relpath(secret, model))
    (model / "vocab.txt").symlink_to("below/vocab.txt")
    report = import_model(repository, model, "m")
    assert _stored_files(repository) == {"config.json": b'{"model_type": "tiny"}', "vocab.txt": b"a b"}
    assert [name.split()[0] for name in report.left_out] == ["below", "merges.txt", "tokenizer.json"]
    assert str(secret) in report.left_out[1]


def test_a_snapshot_of_the_hub_cache_is_imported_with_its_links_to_blobs(repository, folder, secret):
    """huggingface/transformers#46611: files of a snapshot in the cache of the Hub are links to `blobs` beside."""
    snapshot, blobs = folder / "models--a--b" / "snapshots" / "0a1b", folder / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    _write_weights(blobs / "weights")
    (blobs / "config").write_bytes(b"{}")
    (blobs / "vocab").symlink_to(secret)
    for name, blob in (("model.safetensors", "weights"), ("config.json", "config"), ("vocab.json", "vocab")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    report = import_model(repository, snapshot, "m")
    assert _stored_files(repository) == {"config.json": b"{}"}
    assert [name.split()[0] for name in report.left_out] == ["vocab.json"]


def _hugging_face(folder, outside):
    _write_weights(outside / "x.safetensors")
    (folder / "model.safetensors").symlink_to(outside / "x.safetensors")


def _indexed(folder, outside):
    _hugging_face(folder, outside)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))


def _linked_index(folder, outside):
    _write_weights(folder / "model.safetensors")
    (outside / "index").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    (folder / "model.safetensors.index.json").symlink_to(outside / "index")


def _exported(folder, outside):
    _write_weights(folder / "tensors.safetensors")
    (folder / "state.json").symlink_to(outside / "token.json")


def _torch_bin(folder, outside):
    torch.save({"w": _WEIGHT}, outside / "x.bin")
    (folder / "pytorch_model.bin").symlink_to(outside / "x.bin")


def _checkpoint(folder, outside):
    torch.save({"w": _WEIGHT}, outside / "x.pt")
    (folder / "checkpoint.pt").symlink_to(outside / "x.pt")


def _dcp(folder, outside):
    save_dcp({"w": _WEIGHT}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / "__0_0.distcp").rename(outside / "x.distcp")
    (folder / "__0_0.distcp").symlink_to(outside / "x.distcp")


def _dcp_metadata(folder, outside):
    save_dcp({"w": _WEIGHT}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / ".metadata").rename(outside / "metadata")
    (folder / ".metadata").symlink_to(outside / "metadata")


def _parent_in_index(folder, outside):
    _write_weights(outside / "x.safetensors")
    name = os.path.relpath(outside / "x.safetensors", folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))


@pytest.mark.parametrize(
    "make",
    [
        _hugging_face, _indexed, _linked_index, _exported, _torch_bin, _checkpoint, _dcp, _dcp_metadata,
        _parent_in_index,
    ],
)  # fmt: skip
def test_weights_outside_of_the_folder_are_not_imported_with_it(make, repository, folder, secret):
    """Orange-OpenSource/hurl#5289: only the text of a path was checked, so a link inside the root led out of it."""
    model = folder / "model"
    model.mkdir(parents=True)
    make(model, secret.parent)
    with pytest.raises((ConfigError, CorruptDataError), match=r"link out of the folder|in the same folder"):
        import_model(repository, model, "m")
    assert not repository.names("models")


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_an_artefact_has_no_file_that_a_link_of_its_folder_leads_to(kind, repository, folder, secret):
    """Orange-OpenSource/hurl#5289: only the text of a path was checked, so a link inside the root led out of it."""
    model = folder / "model"
    (model / "engine").mkdir(parents=True)
    _write_weights(model / "model.safetensors")
    import_model(repository, model / "model.safetensors", "m")
    if kind == "pipe":
        os.mkfifo(model / "engine" / "x")
    else:
        (model / "engine" / "x").symlink_to(secret if kind == "link" else secret.parent)
    with pytest.raises(ConfigError, match=r"link out of the folder|not a regular file"):
        attach(repository, "m@1", model / "engine")


def _image(folder):
    (folder / "cat").mkdir()
    (folder / "cat" / "1.jpg").write_bytes(jpeg())
    return "cat/2.jpg", jpeg(seed=1)


def _table(suffix, content):
    def make(folder):
        (folder / f"a{suffix}").write_bytes(content(1))
        return f"b{suffix}", content(2)

    return make


def _csv(value):
    return f"text,n\nx,{value}\n".encode()


def _parquet(value):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"n": [value]}), buffer)
    return buffer.getvalue()


def _json(value):
    return json.dumps({"n": value}).encode() + b"\n"


@pytest.mark.parametrize(
    "make",
    [_image, _table(".csv", _csv), _table(".parquet", _parquet), _table(".jsonl", _json)],
    ids=["images", "csv", "parquet", "jsonl"],
)
def test_a_link_out_of_somebodys_data_folder_is_not_ingested_by_folder_or_pattern(make, repository, folder, secret):
    """libgit2/pygit2#614: a link in a folder of somebody else, with any name, leads to a private file."""
    data = folder / "data"
    data.mkdir(parents=True)
    name, content = make(data)
    secret.write_bytes(content)
    (data / name).symlink_to(secret)
    # The pattern finds the link alone.
    for url in (str(data), f"{data}/{name.replace('.', '*.')}"):
        with pytest.raises(ConfigError, match="is a link out of the source"):
            ingest(repository, url, "d")


def test_a_folder_of_links_to_itself_is_refused_at_once(repository, folder):
    """huggingface/huggingface_hub#4205: a scan that follows links to folders does not end if one leads back."""
    data = folder / "data"
    data.mkdir(parents=True)
    for name in "ab":
        (data / name).symlink_to(".")
    with pytest.raises(NotFoundError, match="it is empty"):
        ingest(repository, str(data), "d")
    (data / "c").symlink_to(folder)
    (folder / "a.csv").write_bytes(_csv(1))
    with pytest.raises(ConfigError, match=r"link to one of its parent folders|link out of the source"):
        ingest(repository, str(data), "d")


@pytest.mark.parametrize("path", ["loop", "~nobody-of-this-name/x"])
def test_a_path_that_cannot_be_resolved_is_an_error_of_ours(path, repository, folder):
    """pypa/distutils#44: links that lead to each other end what resolves them."""
    folder.mkdir(exist_ok=True)
    (folder / "loop").symlink_to(folder / "loop")
    named = str(folder / path) if path == "loop" else path
    model = folder / "model"
    model.mkdir()
    _write_weights(model / "model.safetensors")
    import_model(repository, model / "model.safetensors", "m")
    for use in (lambda: attach(repository, "m@1", named), lambda: Cache(named)):
        with pytest.raises(DatasvcError):
            use()
