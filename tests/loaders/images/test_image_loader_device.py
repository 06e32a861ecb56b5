"""`ImageLoader` for a GPU, whose copies a device of the host's memory stands in for; and page-locked batches."""

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.loaders import AugmentConfig, DecodeConfig, ImageLoader, Mixture
from datasvc.loaders.core import pinned
from datasvc.loaders.decode import cpu
from datasvc.loaders.decode.gpu.upload import UploadBackend
from datasvc.loaders.images import image_decoder, image_loader
from tests.loaders.decode.recorded_stream import RecordedStream
from tests.loaders.images.test_image_loader import same, take

FAST = {"batch_size": 32, "training": True, "size": 32, "decode": DecodeConfig(num_threads=1)}
COLUMNS = ("key", "width", "label")


@pytest.fixture
def on_device(monkeypatch):
    """Make loaders for a GPU: images stay in memory of the host, what lies beside them is on torch's meta device."""

    def make_backend(config, backend, *, framework, profiler):
        return UploadBackend(config, backend="cpu", device="cpu", profiler=profiler, stream=RecordedStream())

    def place(values, device):
        assert device == "cuda:1"
        return torch.from_numpy(values).to("meta")

    monkeypatch.setattr(image_loader, "make_backend", make_backend)
    monkeypatch.setattr(image_decoder, "place", place)

    def make(split, **options):
        return ImageLoader(split, **{**FAST, "device": "cuda:1", "decode": "cpu", **options})

    return make


def test_labels_mask_and_numbers_come_on_the_device_and_python_values_do_not(digits, on_device):
    mixture = Mixture([(digits["train"], 3), (digits["val"], 1)], epoch_samples=64, block=16)
    with on_device(mixture, columns=COLUMNS) as loader:
        batch = next(iter(loader))
    for tensor in (batch.labels, batch.mask, batch.sources, batch.columns["width"], batch.columns["label"]):
        assert (tensor.device.type, len(tensor)) == ("meta", 32)
    assert isinstance(batch.positions, np.ndarray)
    assert all(isinstance(key, str) for key in batch.columns["key"])


def test_batches_of_a_gpu_are_those_of_the_cpu_and_resume_among_them(digits, on_device):
    with ImageLoader(digits["train"], **FAST) as loader:
        expected = take(loader, 8)
    with on_device(digits["train"]) as loader:
        found = take(loader, 3)
        state = loader.state_dict()  # another batch is on its way to the device by now
    with on_device(digits["train"], batch_size=32) as loader:
        loader.load_state_dict(state)
        found += take(loader, 5)
    for first, second in zip(expected, found, strict=True):
        assert torch.equal(first.images, second.images)
        assert np.array_equal(first.positions, second.positions)


def test_cuda_is_the_current_device_when_the_loader_is_made(digits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    with ImageLoader(digits["val"], **FAST, device="cuda") as loader:
        assert loader._config.device_id == 5
    with ImageLoader(digits["val"], **FAST, device="cuda:2") as loader:
        assert loader._config.device_id == 2


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "finds no GPU"),
        (torch.device("cuda"), "finds no GPU"),
        ("cuda:", "expected 'cpu'"),
        ("cuda:x", "expected 'cpu'"),
    ],
)
def test_a_device_that_is_none_is_refused(digits, monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        ImageLoader(digits["val"], **FAST, device=device)


def test_colours_are_not_refused_where_dali_decodes_and_a_transform_is(digits, monkeypatch):
    monkeypatch.setattr(image_loader, "find_missing", dict)
    jitter = AugmentConfig(brightness=0.4)
    with ImageLoader(digits["val"], **{**FAST, "decode": "gpu"}, device="cuda:0", augment=jitter) as loader:
        assert loader.decode.startswith("gpu")
    with pytest.raises(ConfigError, match="no transform"):
        ImageLoader(
            digits["val"],
            **{**FAST, "decode": "gpu"},
            device="cuda:0",
            augment=AugmentConfig(transform=lambda image_loader, _: image_loader),
        )


@pytest.fixture
def with_gpu(monkeypatch):
    """Return what was page-locked: tensors that were decoded to, and shapes that were copied."""
    allocated, copied = [], []

    def empty_pinned(shape, dtype):
        allocated.append(torch.from_numpy(np.empty(shape, dtype)))
        return allocated[-1]

    def pin_memory(tensor):
        if not any(tensor.data_ptr() == each.data_ptr() for each in allocated):
            copied.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(pinned, "can_pin", lambda: True)
    monkeypatch.setattr(cpu, "empty_pinned", empty_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return allocated, copied


@pytest.mark.parametrize("output", ["float32", "bfloat16"])
def test_pinned_images_are_decoded_where_they_stay_and_the_rest_is_copied(digits, with_gpu, output):
    allocated, copied = with_gpu
    with ImageLoader(digits["train"], **FAST, pixels=output) as loader:
        expected = take(loader, 1)[0]
    with ImageLoader(digits["train"], **FAST, columns=COLUMNS, pixels=output) as loader:
        batch = next(loader.pin())
    assert same(batch, expected)
    assert batch.images.data_ptr() == allocated[0].data_ptr()
    assert copied == [(32,)] * 4  # labels, mask and two columns


def test_pinned_and_other_batches_in_turns_are_one_run_and_without_a_gpu_a_warning_says_so(digits):
    with ImageLoader(digits["train"], **FAST) as loader:
        expected = take(loader, 4)
    with ImageLoader(digits["train"], **FAST) as loader:
        found = take(loader, 1)
        with pytest.warns(RuntimeWarning, match=r"batches of pin\(\) are in ordinary memory"):
            batches = loader.pin()
        found += [next(batches), next(batches)]
        found += take(loader, 1)
    assert all(map(same, found, expected))


def test_what_is_on_a_gpu_is_not_pinned(digits):
    with ImageLoader(digits["val"], **FAST, device="cuda:0") as loader, pytest.raises(ConfigError, match="pin"):
        loader.pin()


def test_every_tensor_of_a_batch_is_pinned_and_nothing_else_changes(with_gpu):
    _, copied = with_gpu
    batch = image_loader.ImageBatch(
        images=torch.zeros(2, 3),
        labels=None,
        mask=torch.ones(2, dtype=torch.bool),
        epoch=3,
        positions=np.arange(2),
        columns={"score": torch.zeros(2), "key": ["a", "b"]},
    )
    changed = batch.pin_memory()
    assert copied == [(2, 3), (2,), (2,)]
    assert (changed.labels, changed.epoch, changed.columns["key"]) == (None, 3, ["a", "b"])
