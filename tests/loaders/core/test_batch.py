"""A batch is a tuple of inputs and labels, and moves to a device."""

from operator import length_hint

import numpy as np
import pytest
import torch

from datasvc.loaders import ImageBatch, TokenBatch

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
def test_frameworks_move_a_batch_as_they_move_a_tensor(batch, inputs):
    accelerate = pytest.importorskip("accelerate.utils")
    assert accelerate.send_to_device(batch, "meta")[0].device.type == "meta"


@BATCHES
def test_without_a_gpu_nothing_is_pinned(batch, inputs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert batch.pin_memory() is batch
