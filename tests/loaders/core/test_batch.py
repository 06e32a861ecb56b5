"""A batch is a tuple of inputs and labels, and moves to a device."""

import pickle
from operator import length_hint

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.loaders import ImageBatch, ImageLoader, Mixture, TokenBatch
from datasvc.loaders.core import sample_keys
from datasvc.loaders.core.batch import check_gpu
from datasvc.shards.format.overlaid_shard import read_index

TENSOR = torch.zeros(3)


def image_batch(**columns):
    """Return an image batch of a mixture."""
    return ImageBatch(
        images=torch.ones(3, 2),
        labels=torch.arange(3),
        mask=torch.ones(3, dtype=torch.bool),
        epoch=4,
        positions=np.arange(3),
        columns=columns,
        bad={1: "no image"},
        sources=TENSOR,
    )


def token_batch():
    return TokenBatch(
        torch.ones(3, 2), TENSOR, TENSOR, epoch=4, positions=np.arange(3), labels=torch.arange(3), max_seqlen=2
    )


BATCHES = pytest.mark.parametrize(
    ("batch", "inputs"), [(image_batch(), "images"), (token_batch(), "tokens")], ids=["images", "tokens"]
)


@BATCHES
def test_a_batch_unpacks_and_indexes_as_inputs_and_labels(batch, inputs):
    first, second = batch
    assert first is batch[0] is batch[-2] is getattr(batch, inputs)
    assert second is batch[1] is batch[-1] is batch.labels
    assert batch[np.int64(1)] is batch.labels
    assert (len(batch), length_hint(batch), len(batch.positions)) == (2, 2, 3)
    match list(batch):
        case [images, labels]:
            assert (images, labels) == (first, second)


@BATCHES
@pytest.mark.parametrize("index", [2, -3])
def test_there_is_nothing_behind_inputs_and_labels(batch, inputs, index):
    with pytest.raises(IndexError):
        batch[index]


def test_without_labels_the_second_is_none():
    batch = ImageBatch(TENSOR, None, TENSOR, epoch=0, positions=np.arange(3))
    assert (batch[1], batch[-1], list(batch)[1], len(batch)) == (None, None, None, 2)


def test_all_tensors_move_to_a_device_and_other_values_stay():
    batch = image_batch(score=TENSOR, key=["a", "b", "c"])
    moved = batch.to("meta")
    for tensor in (*moved, moved.mask, moved.sources, moved.columns["score"]):
        assert tensor.device.type == "meta"
    assert moved.columns["key"] == ["a", "b", "c"]
    assert (moved.epoch, moved.bad) == (4, {1: "no image"})
    assert moved.positions is batch.positions
    assert batch.images.device.type == "cpu"


@BATCHES
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 0)], ids=str)
def test_a_gpu_that_is_not_there_is_refused_with_what_to_do(batch, inputs, device, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.Tensor, "to", fail)
    with pytest.raises(ConfigError, match=r"device is 'cuda.*', and torch finds no GPUs here; .* device 'cpu'"):
        batch.to(device)


@pytest.mark.parametrize(
    ("is_built", "count", "advice"),
    [
        (False, 0, "no GPUs here; this torch is built without CUDA"),
        (True, 0, "no GPUs here; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (True, 1, "1 GPU here; use 'cuda:0' or a lower number"),
        (True, 3, "3 GPUs here; use 'cuda:2' or a lower number"),
    ],
)
def test_the_advice_fits_the_reason(monkeypatch, is_built, count, advice):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    with pytest.raises(ConfigError, match=advice):
        check_gpu("cuda:3")
    check_gpu("cpu")
    check_gpu(torch.device("meta"))


def test_other_errors_of_a_move_are_those_of_torch(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "to", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        image_batch().to("cuda")


@BATCHES
def test_frameworks_move_a_batch_as_they_move_a_tensor(batch, inputs):
    accelerate = pytest.importorskip("accelerate.utils")
    assert accelerate.send_to_device(batch, "meta")[0].device.type == "meta"


@BATCHES
def test_without_a_gpu_nothing_is_pinned(batch, inputs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert batch.pin_memory() is batch


def test_keys_and_stored_samples_are_found_from_a_batch_on_every_loader(digits):
    keys = [sample["key"] for sample in digits["train"]]
    mixture = Mixture({digits["train"]: 1, digits["val"]: 1}, block=16)
    for samples in (digits["train"], mixture):
        loader = ImageLoader(samples, batch_size=16, training=True, size=16, columns=("key",))
        batch = next(iter(loader)).to("cpu")
        assert batch.keys == batch.columns["key"]
        assert [batch.sample(index)["key"] for index in range(16)] == batch.keys
        assert pickle.loads(pickle.dumps(batch)).keys == batch.keys
    assert set(next(iter(loader.numpy())).keys) - set(keys)
    assert ImageBatch(batch.images, None, batch.mask, 0, batch.positions).places is None
    with pytest.raises(ConfigError, match="not made by a loader"):
        _ = ImageBatch(batch.images, None, batch.mask, 0, batch.positions).keys


def test_a_batch_reads_no_index_unless_its_keys_are_asked_for(digits, monkeypatch):
    loader = ImageLoader(digits["train"], batch_size=16, training=True, size=16)
    batch = next(iter(loader))
    read = []
    monkeypatch.setattr(sample_keys, "read_index", lambda *place: read.append(place) or read_index(*place))
    next(iter(loader))
    assert read == []
    assert len(batch.keys) == 16
    first = len(read)
    assert first > 0
    assert batch.keys == batch.keys
    assert len(read) == first
