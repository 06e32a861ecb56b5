"""A version opened as a safetensors file answers as the file of its export does."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from datasvc.api import DataRepository
from datasvc.cache import Cache
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models import save
from datasvc.models.interop import export_model
from datasvc.models.tensors.write import store_chunks, store_tensors
from tests.models.stored import object_file

STATE = {
    "model": {
        "layer.weight": torch.arange(40 * 30).reshape(40, 30).float(),
        "scale": torch.tensor(3, dtype=torch.bfloat16),
        "deep": torch.arange(2 * 3 * 5, dtype=torch.int16).reshape(2, 3, 5),
    },
    "optimizer": {"momentum": torch.ones(4)},
}


@pytest.fixture
def repo(repository, monkeypatch):
    # Each row of `layer.weight` is a chunk.
    for function in (store_tensors, store_chunks):
        monkeypatch.setitem(function.__kwdefaults__, "chunk_bytes", 120)
    save(repository, "net", STATE, step=1, codec="none")
    return DataRepository(repository)


def test_it_answers_as_the_exported_file_does(repo, tmp_path):
    export_model(repo.repository, "net", tmp_path / "out", "huggingface")
    with (
        repo.models.open_safetensors("net@1") as opened,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as file,
    ):
        assert opened.keys() == sorted(opened.offset_keys()) == sorted(file.keys())
        assert opened.metadata()["version"] == "net@1"
        for name in file.keys():  # noqa: SIM118 - a file is no dict
            assert torch.equal(opened.get_tensor(name), file.get_tensor(name))
            assert opened.get_tensor(name).dtype == file.get_tensor(name).dtype
            one, other = opened.get_slice(name), file.get_slice(name)
            assert (one.get_shape(), one.get_dtype()) == (other.get_shape(), other.get_dtype())
        assert repr(opened) == "OpenTensors(net@1, 3 tensors)"
        assert opened.get_tensors().keys() == set(opened.keys())
    assert repo.models.open_safetensors("net", prefix="optimizer").keys() == ["momentum"]
    assert repo.models.open_safetensors("net", prefix="").keys()[-1] == "optimizer.momentum"


def part_of(size):
    bound = st.one_of(st.none(), st.integers(-size - 2, size + 2))
    return st.one_of(
        st.integers(-size, size - 1), st.builds(slice, bound, bound, st.one_of(st.none(), st.integers(1, 3)))
    )


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.data())
def test_a_slice_is_that_of_the_tensor(repo, data):
    name = data.draw(st.sampled_from(["layer.weight", "deep", "scale"]))
    tensor = STATE["model"][name]
    parts = [data.draw(part_of(size)) for size in tensor.shape[: data.draw(st.integers(0, tensor.dim()))]]
    if data.draw(st.booleans()):
        tail = tensor.shape[tensor.dim() - data.draw(st.integers(0, tensor.dim() - len(parts))) :]
        parts = [*parts, ..., *[data.draw(part_of(size)) for size in tail]]
    key = parts[0] if len(parts) == 1 else tuple(parts)
    assert torch.equal(repo.models.open_safetensors("net").get_slice(name)[key], tensor[key])


def test_a_slice_reads_its_own_chunks_only(repo):
    sliced = repo.models.open_safetensors("net").get_slice("layer.weight")
    assert len(sliced._record.chunks) == 40
    path = object_file(repo.repository, "net", "model.layer.weight")
    content = bytearray(path.read_bytes())
    at = content.index(STATE["model"]["layer.weight"][39].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert torch.equal(sliced[:39, 4:], STATE["model"]["layer.weight"][:39, 4:])
    with pytest.raises(CorruptDataError, match=r"layer\.weight"):
        sliced[39]


def test_what_is_not_there_or_no_index_is_refused(repo):
    opened = repo.models.open_safetensors("net")
    with pytest.raises(NotFoundError, match="has no tensor 'lost'"):
        opened.get_tensor("lost")
    deep = opened.get_slice("deep")
    for key in ([0, 1], (..., ...), slice(None, None, -1), True, None, torch.tensor([0, 1]), np.array([1])):
        with pytest.raises(ConfigError, match="give"):
            deep[key]
    assert torch.equal(deep[np.int64(1)], STATE["model"]["deep"][1])
    for key in (2, (0, 0, 0, 0)):
        with pytest.raises(IndexError):
            deep[key]
    with pytest.raises(ConfigError, match="no tensor is below 'weights'"):
        repo.models.open_safetensors("net", prefix="weights")


def test_tensors_come_through_a_cache(repo, tmp_path):
    with Cache(tmp_path / "cache", budget="10MB") as cache:
        for _ in range(2):
            opened = repo.models.open_safetensors("net", cache=cache)
            assert torch.equal(opened.get_tensor("deep"), STATE["model"]["deep"])
        assert cache.status().num_resident == 1
