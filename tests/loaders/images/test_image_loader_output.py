"""What `ImageLoader` hands over: pixels, types, layouts, columns, frameworks."""

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from datasvc.errors import ConfigError
from datasvc.loaders import DecodeConfig, ImageLoader, PixelFormat
from datasvc.loaders.augment.augment import AugmentConfig, plan_random_windows
from datasvc.shards import ingest, open_dataset
from tests.samples import jpeg

ROOT = Path(__file__).parents[3]
FAST = {"batch_size": 8, "training": True, "size": 32, "decode": DecodeConfig(num_threads=2)}


def first(split, **options):
    with ImageLoader(split, **{**FAST, **options}) as loader:
        return next(iter(loader))


@pytest.mark.parametrize("decode", ["cpu", "pillow"])
def test_photos_and_digits_are_pillows_picture_of_the_box_to_less_than_a_level(decode, digits, repository, tmp_path):
    from tools.bench.photos import write_photos

    write_photos(tmp_path / "photos", num_images=6)
    ingest(repository, str(tmp_path / "photos"), "photos")
    for split in (digits["val"], open_dataset(repository, "photos")["train"]):
        batch = first(
            split,
            batch_size=6,
            shuffle=None,
            size=96,
            decode=decode,
            pixels=PixelFormat(output="uint8", layout="NHWC"),
        )
        samples = [split[number] for number in range(6)]
        widths, heights = (np.array([sample[side] for sample in samples]) for side in ("width", "height"))
        crops = plan_random_windows(widths, heights, batch.positions, seed=0, epoch=0, config=AugmentConfig())
        for index, sample in enumerate(samples):
            (top, left), (height, width) = crops.starts[index].tolist(), crops.shapes[index].tolist()
            image = Image.open(io.BytesIO(sample["image"])).convert("RGB")
            box = (left, top, left + width, top + height)
            expected = np.asarray(image.resize((96, 96), Image.Resampling.BILINEAR, box=box), np.float64)
            expected = expected[:, ::-1] if crops.flips[index] else expected
            assert np.abs(batch.images[index].numpy() - expected).mean() < 1


@pytest.mark.parametrize("output", ["uint8", "float32", "float16", "bfloat16"])
def test_images_have_the_type_and_layout_that_is_asked_for(digits, output):
    planes, pixels = (
        first(digits["val"], pixels=PixelFormat(output=output, layout=layout)).images for layout in ("NCHW", "NHWC")
    )
    assert planes.dtype == pixels.dtype == getattr(torch, output)
    assert (planes.shape, pixels.shape) == ((8, 3, 32, 32), (8, 32, 32, 3))
    assert torch.equal(planes.permute(0, 2, 3, 1), pixels)


def test_numpy_batches_are_the_same_run_to_a_level(digits):
    split = digits["val"]
    with ImageLoader(split, **FAST, pixels="uint8") as loader, ImageLoader(split, **FAST, pixels="uint8") as other:
        for _, batch, tensors in zip(range(5), loader.numpy(), other, strict=False):
            assert (type(batch.images), type(batch.labels), type(batch.mask)) == (np.ndarray,) * 3
            assert np.abs(batch.images.astype(int) - tensors.images.numpy().astype(int)).max() <= 1
            assert batch.labels.tolist() == tensors.labels.tolist()
            assert batch.positions.tolist() == tensors.positions.tolist()
            assert loader.state_dict() == other.state_dict()


def test_a_run_may_change_between_torch_and_numpy_at_any_batch(digits):
    with ImageLoader(digits["val"], **FAST) as loader:
        tensors, arrays = iter(loader), loader.numpy()
        kinds, positions = [], []
        for batches in (tensors, arrays, arrays, tensors, arrays):
            batch = next(batches)
            kinds.append(type(batch.images))
            positions += batch.positions.tolist()
    assert kinds == [torch.Tensor, np.ndarray, np.ndarray, torch.Tensor, np.ndarray]
    assert positions == list(range(40))


@pytest.mark.slow
def test_torch_is_not_imported_for_numpy_batches(digits):
    split = digits["val"]
    code = f"""
import sys, pickle
split = pickle.loads({__import__("pickle").dumps(split)!r})
from datasvc.loaders import ImageLoader
with ImageLoader(split, batch_size=8, training=True, size=32, columns=("key",), tail="short") as loader:
    count = sum(len(batch.images) for batch in loader.numpy())
print(count, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["360", "False"]


@pytest.mark.parametrize("options", [{"pixels": "bfloat16"}, {"device": "cuda:0"}])
def test_what_numpy_does_not_have_is_refused_at_once(digits, options):
    with ImageLoader(digits["val"], **FAST, **options) as loader, pytest.raises(ConfigError, match="NumPy"):
        loader.numpy()


@pytest.fixture
def captioned(repository, tmp_path):
    table = pa.table({
        "key": [f"{number:02d}" for number in range(12)],
        "image": pa.array([jpeg(40, 30, seed=number) for number in range(12)], pa.large_binary()),
        "score": pa.array([number / 4 for number in range(12)], pa.float32()),
        "kept": pa.array([number % 3 == 0 for number in range(12)]),
        "caption": [f"picture {number}" if number % 4 else None for number in range(12)],
        "tags": [["a"] * (number % 3) for number in range(12)],
    })  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    ingest(repository, str(tmp_path / "train.parquet"), "captioned")
    return open_dataset(repository, "captioned")["train"]


def test_other_columns_lie_beside_in_the_order_of_the_images(captioned):
    columns = ("key", "score", "kept", "caption", "tags", "width")
    batch = first(captioned, batch_size=12, columns=columns)
    numbers = [int(key) for key in batch.columns["key"]]
    assert sorted(numbers) == list(range(12))
    assert batch.columns["score"].dtype == torch.float32
    assert batch.columns["score"].tolist() == [number / 4 for number in numbers]
    assert batch.columns["kept"].tolist() == [number % 3 == 0 for number in numbers]
    assert batch.columns["caption"] == [f"picture {number}" if number % 4 else None for number in numbers]
    assert batch.columns["tags"] == [["a"] * (number % 3) for number in numbers]
    assert batch.columns["width"].tolist() == [40] * 12
    with ImageLoader(captioned, **{**FAST, "batch_size": 12}, columns=columns) as loader:
        arrays = next(loader.numpy()).columns
    assert (type(arrays["score"]), arrays["tags"]) == (np.ndarray, batch.columns["tags"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ("caption", "weight")}, "has no column 'weight'; its columns are"),
        ({"pixels": "int8"}, "output is 'int8'"),
        ({"decode": "opencv"}, "decode is 'opencv'"),
        ({"decode": "gpu"}, "give device='cuda'"),
    ],
)
def test_what_cannot_be_delivered_is_refused(captioned, options, message):
    with pytest.raises(ConfigError, match=message):
        first(captioned, **options)


def test_an_image_column_alone_is_enough_and_labels_are_none(captioned):
    assert first(captioned).labels is None
    assert dict(first(captioned).columns) == {}


def test_a_transform_sees_mirrored_pixels_and_draws_the_same_again(digits):
    def noise(image, generator):
        return np.clip(image + generator.integers(-20, 20, image.shape), 0, 255).astype(np.uint8)

    plain, noisy, again = (
        first(digits["val"], pixels="uint8", augment=AugmentConfig(transform=transform)).images.int()
        for transform in (None, noise, noise)
    )
    assert torch.equal(noisy, again)
    assert 0 < (noisy - plain).abs().max() <= 20


def test_a_transform_that_returns_something_else_is_named(digits):
    with pytest.raises(ConfigError, match="transform returned"):
        first(digits["val"], augment=AugmentConfig(transform=lambda image, _: image[:4]))


def test_a_transform_that_fails_says_at_which_sample(digits):
    with pytest.raises(ZeroDivisionError) as raised:
        first(digits["val"], augment=AugmentConfig(transform=lambda image, _: image / (1 // 0)))
    assert re.search(r"the sample at position \d+ of epoch 0", raised.value.__notes__[0])
