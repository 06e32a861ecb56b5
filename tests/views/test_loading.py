"""Batches and audits as a notebook shows them."""

import base64
import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image

from datasvc.ledger.audit import audit
from datasvc.ledger.file import read_ledger
from datasvc.loaders import DecodeConfig, ImageBatch, ImageLoader, PixelFormat, TokenBatch
from datasvc.shards import open_dataset
from datasvc.views.loading import to_array, to_levels
from tests.drawing.hostile import HOSTILE, local_name, parsed, text_of, with_class
from tests.loaders.echo import EchoLoader, write_numbers

OUTPUTS = ["uint8", "float32", "float16", "bfloat16"]


def images_of(root):
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(each.get("src").partition(",")[2]))))
        for each in root.iter()
        if local_name(each) == "img"
    ]


def batch_of(split, **options):
    settings = {"batch_size": 8, "training": False, "size": 32, "decode": DecodeConfig(num_threads=1), **options}
    with ImageLoader(split, **settings) as loader:
        return next(iter(loader))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_the_pictures_are_those_of_the_files_whatever_the_format_of_the_batch(digits, output, layout):
    expected = to_array(batch_of(digits["val"], pixels=PixelFormat("uint8", "NHWC")).images)
    batch = batch_of(digits["val"], pixels=PixelFormat(output, layout))
    levels = to_levels(to_array(batch.images), batch.display)
    assert np.abs(levels.astype(int) - expected).max() <= (2 if output == "bfloat16" else 1)
    assert (images_of(parsed(batch._repr_html_()))[3] == levels[3]).all()


def test_labels_are_class_names_and_positions_are_named(digits):
    batch = batch_of(digits["val"])
    captions = [text_of(each) for each in parsed(batch._repr_html_()).iter() if local_name(each) == "figcaption"]
    names = [digits["val"].classes[label] for label in batch.labels.tolist()]
    assert captions == [f"{name} position {number}" for number, name in enumerate(names)]


def test_at_most_64_pictures_are_shown(digits):
    root = parsed(batch_of(digits["train"], batch_size=100)._repr_html_())
    assert len(images_of(root)) == 64
    assert "100, the first 64 are shown" in text_of(root)


def test_a_batch_that_no_loader_made_is_shown_too():
    images = torch.linspace(-3, 5, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    images[0, 0, 0, 0] = torch.nan
    batch = ImageBatch(
        images, torch.tensor([5, 0]), torch.tensor([True, False]), 0, np.arange(2), bad={1: "no image"}
    )
    root = parsed(batch._repr_html_())
    assert "label 5" in text_of(root)
    (masked,) = with_class(root, "bad")
    assert "masked" in text_of(masked)
    assert images_of(root)[1].max() == 255


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_reason_stays_text(text):
    images = np.zeros((1, 4, 4, 3), np.uint8)
    parsed(ImageBatch(images, None, np.array([False]), 0, np.arange(1), bad={0: text})._repr_html_())


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_a_batch_of_tokens_shows_the_first_ones(convert):
    tokens = np.arange(40).reshape(2, 20)
    batch = TokenBatch(
        convert(tokens),
        convert(np.array([20, 0])),
        convert(np.array([True, False])),
        epoch=3,
        positions=np.array([7, 9]),
    )
    shown = text_of(parsed(batch._repr_html_()))
    assert "7 20 0 1 2 3" in shown
    assert "15 …" in shown
    assert shown.endswith("padding")


def test_an_audit_shows_the_verdict_of_each_epoch_and_its_problems(repository, tmp_path):
    write_numbers(repository, [25, 15])
    with EchoLoader(
        open_dataset(repository, "numbers")["train"], batch_size=6, rank=0, world_size=1, ledger=tmp_path / "ledger"
    ) as loader:
        assert len(list(loader)) == 6
    result = audit([list(read_ledger(tmp_path / "ledger"))])
    shown = text_of(parsed(result._repr_html_()))
    assert "proven: no sample was lost or served twice; 36 of 40 served once, 4 dropped by the tail 36 0 4" in shown
    damaged = dataclasses.replace(result, damage=HOSTILE)
    assert "result not proven" in text_of(parsed(damaged._repr_html_()))
