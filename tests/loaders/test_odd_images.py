"""Whatever turns up in a folder of photographs: what each decoder makes of it, and that it never ends an epoch."""

import re

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, types

from datasvc.errors import BadSampleError
from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.loaders.augment.augment import AugmentConfig
from datasvc.loaders.decode.pixels import PixelFormat
from datasvc.loaders.decode.worker import ImageWorker, decode_window
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.images.header import ImageHeader, read_header
from tests.support.odd_images import HEIGHT, WIDTH, bad_images, good_images, picture

GOOD, BAD = good_images(), bad_images()
# Of these its decoders know nothing; Pillow decodes them in its place.
NOT_FOR_DALI = {"gif-called.jpg", "black-white.tif", *(f"turned-{turn}-lossless.webp" for turn in range(1, 9))}
START, SIDE = (5, 7), 30


def decode_with_dali(content, start, side):
    """Return `uint8[side, side, 3]`, or raise RuntimeError."""
    pipe = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipe:
        images = fn.external_source(name="images")
        window = {"start": start, "shape": (side, side), "axes": [0, 1]}
        pipe.set_outputs(fn.decoders.image_slice(images, output_type=types.RGB, **window))
    pipe.build()
    pipe.feed_input("images", [np.frombuffer(content, np.uint8)])
    return np.asarray(pipe.run()[0].as_array())[0]


def decode_with_backend(backend, content, start, side):
    """Return `uint8[side, side, 3]`, and why not if so."""
    pixels = PixelFormat("uint8", "NHWC")
    out = np.ones(pixels.shape(1, side), np.uint8)[0]
    worker = ImageWorker(pixels, side, backend=backend, framework="torch")
    return out, worker.decode(np.frombuffer(content, np.uint8), start, (side, side), out, flip=False)


def pairs(batch):
    return zip(batch.positions.tolist(), batch.images, strict=True)


def turned(turn):
    """Return what a picture with this orientation looks like upright."""
    pixels = np.asarray(picture())
    pixels = pixels.transpose(1, 0, 2) if turn >= 5 else pixels
    down, right = turn in (3, 4, 7, 6), turn in (2, 3, 7, 8)
    if turn in (6, 8):
        down, right = right, down
    return pixels[:: -1 if down else 1, :: -1 if right else 1]


@pytest.mark.parametrize("name", sorted(GOOD.keys() - NOT_FOR_DALI))
def test_dali_and_pillow_make_the_same_of_an_image(name):
    """No pixel is scaled here, so they differ by the rounding of the two decoders alone."""
    by_pillow = decode_window(GOOD[name], START, (SIDE, SIDE), SIDE).astype(int)
    difference = np.abs(by_pillow - decode_with_dali(GOOD[name], START, SIDE))
    assert (difference.mean() < 0.6, difference.max() <= 2) == (True, True)


@pytest.mark.parametrize("name", sorted(NOT_FOR_DALI))
def test_what_dali_refuses_pillow_decodes_in_its_place(name):
    with pytest.raises(RuntimeError):
        decode_with_dali(GOOD[name], START, SIDE)
    by_pillow = decode_window(GOOD[name], START, (SIDE, SIDE), SIDE)
    found, bad = decode_with_backend("cpu", GOOD[name], START, SIDE)
    assert not bad
    assert np.array_equal(found, by_pillow)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_the_loaders_decoder_and_pillow_make_the_same_of_an_image(name):
    by_pillow, _ = decode_with_backend("pillow", GOOD[name], START, SIDE)
    found, bad = decode_with_backend("cpu", GOOD[name], START, SIDE)
    difference = np.abs(found.astype(int) - by_pillow)
    assert (bad, difference.mean() < 0.6, difference.max() <= 2) == (None, True, True)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", [".jpg", ".png", "-late.png", ".webp", "-lossless.webp", ".tif"])
def test_columns_windows_and_pixels_agree_on_what_is_upright(turn, kind):
    content, expected = GOOD[f"turned-{turn}{kind}"], turned(turn)
    for decode in (False, True):
        assert read_header(content, decode=decode)[1:] == (WIDTH, HEIGHT)[:: -1 if turn >= 5 else 1]
    for backend in ("cpu", "pillow"):
        found, bad = decode_with_backend(backend, content, START, SIDE)
        part = expected[START[0] : START[0] + SIDE, START[1] : START[1] + SIDE].astype(int)
        assert not bad
        assert np.abs(found - part).mean() < 6


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("backend", ["cpu", "pillow"])
def test_what_is_no_image_is_bad_with_every_decoder(name, backend):
    found, reason = decode_with_backend(backend, BAD[name][0], (149 - 16, 180), 16)
    assert re.search(BAD[name][1], reason)
    assert not found.any()


def test_a_window_above_the_end_of_a_cut_jpeg_is_decoded_and_pillow_which_decodes_it_all_refuses():
    content = BAD["cut.jpg"][0]
    _, reason = decode_with_backend("pillow", content, (10, 10), 16)
    assert "does not decode" in reason
    found, reason = decode_with_backend("cpu", content, (10, 10), 16)
    assert reason is None
    assert np.abs(found.astype(int) - np.asarray(picture(200, 150))[10:26, 10:26]).mean() < 3


@pytest.fixture(scope="module")
def odd_split(tmp_path_factory):
    """One class of images that decode, and one of files that do not, as an ingest that checks nothing would take."""
    folder = tmp_path_factory.mktemp("odd")
    repository = Repository.create(str(folder / "repo"))
    for label, files in (("good", GOOD), ("not", {name: content for name, (content, _) in BAD.items() if content})):
        (folder / "source" / label).mkdir(parents=True)
        for name, content in files.items():
            (folder / "source" / label / name).write_bytes(content)

    def measure(content, *, decode=False):
        try:
            return read_header(content, decode=decode)
        except BadSampleError:
            return ImageHeader("JPEG", 200, 600 if content == BAD["promises-more.jpg"][0] else 150)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.images.header.read_header", measure)
        ingest(repository, str(folder / "source"), "odd")
    return open_dataset(repository, "odd")["train"]


@pytest.mark.parametrize("decode", ["cpu", "pillow"])
@pytest.mark.parametrize("training", [True, False])
def test_an_epoch_of_odd_images_serves_all_that_decode_and_masks_and_names_the_rest(odd_split, decode, training):
    shape = {"batch_size": 16, "size": 32, "training": training, "tail": "short", "pixels": "uint8"}
    whole = AugmentConfig(scale=(1, 1), ratio=(0.1, 10))  # of a cut image some windows decode
    named, served = [], {}
    with ImageLoader(
        odd_split, **shape, augment=whole, columns=["key"], decode=DecodeConfig(backend=decode, on_bad="mask")
    ) as loader:
        for batch in loader:
            named += batch.bad.values()
            for index, key in enumerate(batch.columns["key"]):
                served[key] = (bool(batch.mask[index]), batch.images[index].numpy().copy())
        assert loader.num_bad == len(named)
    assert served.keys() == {sample["key"] for sample in odd_split}
    bad = {key for key, (is_good, _) in served.items() if not is_good}
    assert bad == {key for key in served if key.startswith("not/")}
    assert all(any(f"'{key}'" in name for name in named) for key in bad)
    for key, (is_good, pixels) in served.items():
        assert pixels.any() == is_good, key


@pytest.mark.parametrize("decode", ["cpu", "pillow"])
def test_a_bad_sample_spoils_no_pixel_of_the_others(odd_split, decode):
    """Epochs are resumed right at each step, with bad samples among those that were prefetched."""
    shape = {
        "batch_size": 16,
        "size": 32,
        "training": True,
        "tail": "short",
        "decode": DecodeConfig(backend=decode, on_bad="mask"),
    }
    with ImageLoader(odd_split, **shape) as loader:
        whole = {position: image for batch in loader for position, image in pairs(batch)}
    with ImageLoader(
        odd_split,
        **shape | {"batch_size": 7, "decode": DecodeConfig(backend=decode, num_threads=3, prefetch=4, on_bad="mask")},
    ) as loader:
        for batch in loader:
            for position, image in pairs(batch):
                assert torch.equal(image, whole[position])


def test_raising_names_the_shard_and_the_key(odd_split):
    with ImageLoader(odd_split, batch_size=len(odd_split), size=32, training=False) as loader:
        message = r"9 of \d+ samples .*'not/page\.jpg' \(row \d+ of shard .*not an image"
        with pytest.raises(BadSampleError, match=message):
            next(iter(loader))
        assert loader.state_dict()["position"] == 0
