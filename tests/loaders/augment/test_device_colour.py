"""torch changes the colours of a batch as NumPy changes those of each image."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.loaders.augment.augment import AugmentConfig, ColourFactors, plan_colours
from datasvc.loaders.augment.colour import augment_colour
from datasvc.loaders.augment.device_colour import change_colours, plan_passes
from tests.examples import examples
from tests.support.odd_images import picture

JITTERS = {
    "all four": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "far": {"brightness": 2.0, "contrast": 2.0, "saturation": 2.0, "hue": 0.5},
    "brightness": {"brightness": 0.8},
    "contrast": {"contrast": 0.8},
    "saturation": {"saturation": 0.8},
    "hue": {"hue": 0.5},
}


def batch(count):
    return np.stack([np.asarray(picture(31, 20, seed=seed)) for seed in range(count)])


def by_torch(images, factors):
    """Return `uint8[n, height, width, 3]`, as the CPU's own code does."""
    values = torch.from_numpy(images).permute(0, 3, 1, 2).float().contiguous()
    change_colours(values, plan_passes(factors), torch.from_numpy)
    assert torch.equal(values, values.to(torch.uint8).float())
    return values.to(torch.uint8).permute(0, 2, 3, 1).numpy()


def by_numpy(images, factors):
    changed = images.copy()
    augment_colour(changed, factors)
    return changed


@pytest.mark.parametrize("jitter", JITTERS)
def test_the_same_draws_give_the_same_colours_to_a_level(jitter):
    images = batch(24)
    drawn = plan_colours(np.arange(24), seed=3, epoch=1, config=AugmentConfig(**JITTERS[jitter]))
    expected, found = by_numpy(images, drawn), by_torch(images, drawn)
    assert not np.array_equal(expected, images)
    apart = np.abs(found.astype(int) - expected.astype(int))
    assert apart.max() <= 1
    assert apart.mean() < 0.001  # a level apart only where a sum lies half way between two


@examples(50, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=1, max_size=12),
    st.permutations(range(4)),
    st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 1.9])] * 3, st.sampled_from([-0.5, 0.0, 0.3])),
)
def test_any_pixel_in_any_order_is_that_of_the_cpu_to_a_level(pixels, sequence, amounts):
    images = np.array([[pixels]], np.uint8)
    factors = ColourFactors(*[np.array([amount]) for amount in amounts], np.array([sequence], np.int8))
    found, expected = by_torch(images, factors).astype(int), by_numpy(images, factors).astype(int)
    assert np.abs(found - expected).max() <= 1


def test_an_image_does_not_depend_on_the_orders_of_those_beside_it():
    images, drawn = batch(24), plan_colours(np.arange(24), seed=3, epoch=1, config=AugmentConfig(**JITTERS["far"]))
    whole = by_torch(images, drawn)
    for start in (0, 7, 23):
        alone = by_torch(images[start : start + 1], drawn[start : start + 1])
        assert np.abs(alone[0].astype(int) - whole[start].astype(int)).max() <= 1


def test_as_many_passes_as_an_image_has_changes_and_none_without():
    config = AugmentConfig(brightness=0.5, hue=0.1)
    assert len(plan_passes(plan_colours(np.arange(50), seed=0, epoch=0, config=config))) == 2
    assert plan_passes(plan_colours(np.arange(50), seed=0, epoch=0, config=AugmentConfig())) == []
    assert plan_passes(plan_colours(np.arange(0), seed=0, epoch=0, config=config)) == []
