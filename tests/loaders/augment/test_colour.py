import colorsys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageEnhance

from datasvc.loaders.augment.augment import AugmentConfig, ColourFactors, plan_colours
from datasvc.loaders.augment.colour import augment_colour
from tests.examples import examples
from tests.support.odd_images import picture

JITTER = AugmentConfig(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
LEVELS = st.integers(0, 255)


def factors(brightness=1.0, contrast=1.0, saturation=1.0, hue=0.0, sequence=(0, 1, 2, 3), count=1):
    columns = [np.full(count, value) for value in (brightness, contrast, saturation, hue)]
    return ColourFactors(*columns, np.tile(np.array(sequence, np.int8), (count, 1)))


def changed(image, **how):
    images = np.array(image)[None]
    augment_colour(images, factors(**how))
    return images[0].astype(int)


def batch(count):
    return np.stack([np.asarray(picture(31, 20, seed=seed)) for seed in range(count)])


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.9, 1.2, 1.9, 5.0])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ],
)
def test_brightness_contrast_and_saturation_are_pillows(name, enhance, factor):
    """Which are torchvision's for a PIL image. Pillow rounds the grey and cuts fractions off: some levels of 255."""
    expected = np.asarray(enhance(picture()).enhance(factor)).astype(int)
    assert np.abs(changed(picture(), **{name: factor}) - expected).max() <= 1 + abs(1 - factor)


@examples(300)
@given(st.tuples(LEVELS, LEVELS, LEVELS), st.floats(-0.5, 0.5))
def test_a_hue_is_turned_as_in_the_hsv_of_the_standard_library(pixel, turn):
    hue, saturation, value = colorsys.rgb_to_hsv(*(level / 255 for level in pixel))
    expected = 255 * np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value))
    found = changed(np.array(pixel, np.uint8).reshape(1, 1, 3), hue=turn)
    assert np.abs(found[0, 0] - expected).max() < 0.51


@given(st.lists(st.tuples(LEVELS, LEVELS, LEVELS), min_size=1, max_size=20), st.permutations(range(4)))
def test_neutral_factors_change_nothing(pixels, sequence):
    image = np.array([pixels], np.uint8)
    assert np.array_equal(changed(image, sequence=sequence), image)
    assert np.abs(changed(image, brightness=1 + 1e-9, hue=1e-9, sequence=sequence) - image.astype(int)).max() <= 1


def test_changes_are_made_in_their_order_and_cut_to_the_range_between():
    doubled_then_halved = {"brightness": 2.0, "contrast": 0.0}
    image = np.array([[[200, 200, 200], [0, 0, 0]]], np.uint8)
    assert changed(image, sequence=(0, 1, 2, 3), **doubled_then_halved).tolist() == [[[128] * 3] * 2]  # (255 + 0) / 2
    assert changed(image, sequence=(1, 0, 2, 3), **doubled_then_halved).tolist() == [[[200] * 3] * 2]


def test_grey_has_no_hue_and_no_saturation():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    assert np.array_equal(changed(grey, hue=0.37), grey)
    assert np.array_equal(changed(grey, saturation=3.0), grey)


def test_an_images_colours_do_not_depend_on_its_batch_or_its_thread():
    images, drawn = batch(24), plan_colours(np.arange(24), seed=3, epoch=1, config=JITTER)
    whole = images.copy()
    augment_colour(whole, drawn)
    assert not np.array_equal(whole, images)
    parts = images.copy()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: augment_colour(parts[at : at + 3], drawn[at : at + 3]), range(0, 24, 3)))
    assert np.array_equal(parts, whole)


def test_images_of_any_size_and_strides_are_changed_in_place():
    images, drawn = batch(2), plan_colours(np.arange(2), seed=0, epoch=0, config=JITTER)
    expected = images.copy()
    augment_colour(expected, drawn)
    planar = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    mirrored = images[:, :, ::-1].copy()
    augment_colour(planar.transpose(0, 2, 3, 1), drawn)
    augment_colour(mirrored[:, :, ::-1], drawn)
    assert np.array_equal(planar.transpose(0, 2, 3, 1), expected)
    assert np.abs(mirrored[:, :, ::-1].astype(int) - expected).max() <= 1  # the mean adds up in another order
    larger = np.asarray(picture(7, 90))[None].copy()
    augment_colour(larger, drawn[:1])
    assert larger.any()


def test_no_image_is_no_work():
    augment_colour(np.empty((0, 8, 8, 3), np.uint8), factors(count=0))
