"""An export by all ranks, here by one: the same tensors as of `export_model`, in files of its own, or nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

import datasvc
from datasvc.errors import ConfigError, NotFoundError

WEIGHTS = {f"layer{number}": torch.full((100, 10), float(number)) for number in range(4)} | {
    "scale": torch.tensor(2.0)
}


@pytest.fixture
def repo(repository):
    repo = datasvc.open(repository.url)
    repo.models.save("net", {"model": WEIGHTS, "optimizer": {"step": torch.ones(3)}}, step=1)
    return repo


def test_files_and_index_have_the_tensors_of_the_model(repo, tmp_path):
    done = repo.models.export_distributed("net", tmp_path / "out", max_shard_bytes=8000)
    assert [path.name for path in done.files] == [
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert (done.num_tensors, str(done.version)) == (5, "net@1")
    weight_map = json.loads(done.files[-1].read_text())["weight_map"]
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in weight_map.items()}
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    alone = repo.models.export("net", tmp_path / "alone", "huggingface", max_shard_bytes=8000)
    assert [path.read_bytes() for path in alone.files] == [path.read_bytes() for path in done.files]
    part = repo.models.export_distributed("net", tmp_path / "half", only=["model.scale"], dtype="bfloat16")
    assert load_file(part.files[0])["scale"].dtype == torch.bfloat16


def test_after_an_error_there_is_no_folder(repo, tmp_path):
    for options, kind in (({"dtype": "int8"}, ConfigError), ({"only": ["absent"]}, ConfigError)):
        with pytest.raises(kind):
            repo.models.export_distributed("net", tmp_path / "out", **options)
    with pytest.raises(NotFoundError):
        repo.models.export_distributed("net@7", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        repo.models.export_distributed("net", tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("repo", "full")] == []
