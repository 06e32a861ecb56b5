import numpy as np
import pytest

from datasvc.errors import ConfigError
from datasvc.loaders.augment.augment import apply_transform, generators


def image():
    return np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)


def apply(transform, position=7):
    pixels = image()
    apply_transform(transform, pixels, generators(0, 0, np.array([position]))[0])
    return pixels


@pytest.mark.parametrize(
    "transform",
    [
        lambda pixels, _: pixels[::-1],  # a view of what it is given
        lambda pixels, _: pixels[::-1].copy(),
        lambda pixels, _: np.copyto(pixels, image()[::-1]) or pixels,  # in place
    ],
)
def test_a_transform_returns_a_view_or_new_pixels_or_works_in_place(transform):
    assert np.array_equal(apply(transform), image()[::-1])


def test_its_random_numbers_depend_on_the_position():
    def noise(pixels, generator):
        return generator.integers(0, 256, pixels.shape, np.uint8)

    assert np.array_equal(apply(noise), apply(noise))
    assert not np.array_equal(apply(noise), apply(noise, position=8))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda pixels, _: pixels / 255.0, r"returned float64\[5, 4, 3\]; expected a NumPy array, uint8\[5, 4, 3\]"),
        (lambda pixels, _: pixels[:, :2], r"returned uint8\[5, 2, 3\]"),
        (lambda pixels, _: None, "returned NoneType"),
    ],
)
def test_what_is_no_image_of_the_same_shape_is_refused(transform, message):
    with pytest.raises(ConfigError, match=message):
        apply(transform)


def test_what_a_transform_raises_comes_through():
    def failing(_pixels, _generator):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        apply(failing)
