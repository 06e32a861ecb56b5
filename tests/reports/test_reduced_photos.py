"""What users of other tools met with JPEGs that are decoded at a reduced scale, or in part."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from datasvc.loaders import AugmentConfig, DataRanks, DecodeConfig, ImageLoader
from datasvc.loaders.decode.jpeg_frame import JpegFrame
from datasvc.loaders.decode.reduced import decode_reduced
from datasvc.loaders.decode.worker import decode_window
from datasvc.shards import ingest, open_dataset
from tests.support.odd_images import exif

GREEN = (0, 255, 0)


def jpeg(pixels, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95, **options)
    return bytearray(buffer.getvalue())


def both(content, start, shape, size):
    """Return a window at a reduced scale and at full size."""
    blob = np.frombuffer(bytes(content), np.uint8)
    found = decode_reduced(blob, start, shape, size, decodes_windows=False)
    assert found is not None
    return found.astype(int), decode_window(blob, start, shape, size).astype(int)


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("subsampling", [0, 2])
@pytest.mark.parametrize("rest", [1, 2, 4, 6])
def test_what_an_encoder_left_beyond_the_edge_does_not_become_a_line(factor, subsampling, rest):
    """python-pillow/Pillow#3419: `draft` gave photos a coloured line at the border.

    Blocks at the edge reach beyond the image, where some encoders store anything. A smaller transform mixes it in.
    """
    height, width, block = 192 + rest, 224 + rest, 8 if subsampling == 0 else 16
    pixels = np.full((192 + block, 224 + block, 3), 90, np.uint8)
    pixels[height:], pixels[:, width:] = GREEN, GREEN
    content = jpeg(pixels, subsampling=subsampling)
    struct.pack_into(">HH", content, JpegFrame.of(memoryview(content)).offset + 1, height, width)
    for distance in range(8):  # of the window from the edge: its last pixels may be in a part of a reduced one
        shape = (height - distance, width - distance)
        found, full = both(content, (0, 0), shape, shape[0] // (4 * factor))
        assert np.abs(found - 90).max() <= 3, distance
        assert np.abs(full - 90).max() <= 40  # full size has a trace of it, where colours are interpolated


@pytest.mark.parametrize("sampling", [0x11, 0x22, 0x21, 0x41])
def test_the_sampling_factors_of_a_grey_photo_have_no_effect(sampling):
    """libjpeg-turbo/libjpeg-turbo#195: parts of grey photos were decoded from the wrong columns."""
    levels = np.add.outer(np.arange(200) // 2, np.arange(260) // 2).astype(np.uint8)
    content = jpeg(levels)
    content[JpegFrame.of(memoryview(content)).offset + 7] = sampling
    for start in ((0, 0), (70, 101), (72, 132)):
        found, full = both(content, start, (128, 128), 16)
        assert np.abs(found - full).max() <= 1
        assert np.abs(found[0, 0] - (sum(start) / 2 + 3.5)).max() < 2


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("side", [256, 257, 263])
def test_a_picture_in_the_middle_stays_in_the_middle(factor, side):
    """lovell/sharp#848, lovell/sharp#452: artwork of a reduced JPEG was shifted to the left and to the top."""
    distance = np.abs(np.arange(side) - (side - 1) / 2)
    levels = np.where(np.add.outer(distance, distance) < side / 4, 250, 5).astype(np.uint8)
    size = side // (4 * factor)
    found, _ = both(jpeg(levels), (0, 0), (side, side), size)
    weights = found[..., 0] - 5.0
    for axis in (0, 1):
        centre = (weights.sum(1 - axis) * np.arange(size)).sum() / weights.sum()
        assert abs(centre - (size - 1) / 2) < 0.02


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_window_of_a_turned_photo_is_that_of_the_upright_one(orientation):
    """coobird/thumbnailator#207: the region was cut from the photo as stored, before it was turned."""
    pixels = np.zeros((192, 256, 3), np.uint8)
    for number in range(12):  # fields of their own colours
        row, column = divmod(number, 4)
        pixels[64 * row : 64 * row + 64, 64 * column : 64 * column + 64] = (20 * number, 250 - 20 * number, 30 * row)
    content = jpeg(pixels, exif=exif(orientation), subsampling=0)
    height, width = (192, 256) if orientation < 5 else (256, 192)
    for start in ((0, 0), (height - 128, 0), (0, width - 128), (height - 128, width - 128)):
        found, full = both(content, start, (128, 128), 16)
        assert np.abs(found - full).max() <= 12


@pytest.mark.parametrize("side", [1000, 1001, 1005, 1007])
def test_the_last_row_of_an_odd_reduced_size_has_its_colour(side):
    """libjpeg-turbo/libjpeg-turbo#360: a photo of 3,000 pixels at 3/8, 4:2:0, ended in a green line."""
    content = jpeg(np.full((side, side, 3), (200, 40, 160), np.uint8), subsampling=2)
    for factor in (2, 4, 8):
        found, _ = both(content, (0, 0), (side, side), side // (4 * factor))
        assert np.abs(found - (200, 40, 160)).max() <= 3


def test_boxes_keypoints_and_masks_stay_where_they_are_at_a_reduced_scale(repository):
    """roboflow/rf-detr#1389: the sizes of photos that `draft` made smaller no longer were those of their boxes."""
    pixels = np.zeros((300, 400, 3), np.uint8)
    pixels[80:200, 120:300] = 250
    mask = io.BytesIO()
    Image.fromarray(pixels[..., 0] // 250).save(mask, "png")
    sample = {"key": "a", "image": bytes(jpeg(pixels)), "mask": mask.getvalue()}
    sample |= {"boxes": [[120.0, 80.0, 300.0, 200.0]], "box_labels": [0]}
    ingest(repository, [sample], "data")
    split = open_dataset(repository, "data")["train"]
    batches = []
    for scale in ("auto", "full"):
        with ImageLoader(
            split,
            batch_size=1,
            training=True,
            size=32,
            pixels="uint8",
            masks=("mask",),
            boxes="boxes",
            augment=AugmentConfig(scale=(0.9, 0.9), flip=1),
            decode=DecodeConfig(decode_scale=scale),
            ranks=DataRanks(),
        ) as loader:
            batches.append(next(iter(loader)))
            assert loader.state_dict().get("decode_scale", "full") == scale
    found, full = batches
    assert not np.array_equal(found.images, full.images)
    assert np.array_equal(found.masks["mask"], full.masks["mask"])
    assert np.array_equal(found.objects["boxes"], full.objects["boxes"])
    left, top, right, bottom = found.objects["boxes"][0].round().int().tolist()
    inside = np.zeros((32, 32), bool)
    inside[top:bottom, left:right] = True
    assert ((found.images[0, 0].numpy() > 125) != inside).mean() < 0.03
