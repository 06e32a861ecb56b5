import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.loaders.augment.augment import (
    AugmentConfig,
    generators,
    plan_centre_windows,
    plan_colours,
    plan_random_windows,
)
from tests.examples import examples

sides = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=30)


def draw(sizes, positions, seed=0, epoch=0, **options):
    widths, heights = (np.array(column) for column in zip(*sizes, strict=True))
    config = AugmentConfig(**options)
    return plan_random_windows(widths, heights, np.asarray(positions), seed=seed, epoch=epoch, config=config)


def rows(windows):
    return np.concatenate([windows.starts, windows.shapes, windows.flips[:, None]], axis=1).tolist()


@examples(200)
@given(sides, st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_every_window_lies_inside_its_image(sizes, seed, epoch):
    windows = draw(sizes, range(len(sizes)), seed, epoch)
    limits = np.array([(height, width) for width, height in sizes])
    assert (windows.starts >= 0).all()
    assert (windows.shapes >= 1).all()
    assert (windows.starts + windows.shapes <= limits).all()


def test_a_window_depends_on_seed_epoch_and_position_alone():
    sizes = [(500, 375)] * 50
    whole = rows(draw(sizes, range(50), 3, 4))
    assert rows(draw(sizes[:7], [9, 3, 41, 0, 7, 8, 9], 3, 4)) == [whole[p] for p in (9, 3, 41, 0, 7, 8, 9)]
    assert rows(draw(sizes, range(50), 3, 5)) != whole != rows(draw(sizes, range(50), 4, 4))


def test_every_release_draws_the_same_windows():
    """Resumed runs rest on these: another value here is a new format. The third is narrower than any ratio allows."""
    sizes = [(500, 375), (64, 900), (3, 700), (333, 500)]
    assert rows(draw(sizes, [0, 1, 2, 10**9], 3, 4, scale=(0.5, 1.0))) == [
        [2, 83, 373, 314, 1],
        [407, 0, 85, 64, 0],
        [348, 0, 4, 3, 1],
        [70, 24, 363, 295, 0],
    ]


def test_areas_ratios_and_flips_are_distributed_as_asked():
    windows = draw([(1000, 1000)] * 20_000, range(20_000), scale=(0.2, 0.6), ratio=(0.8, 1.25), flip=0.3)
    heights, widths = windows.shapes.T.astype(float)
    areas, logs = heights * widths / 1e6, np.log(widths / heights)
    assert 0.19 < areas.min() < areas.max() < 0.61
    assert areas.mean() == pytest.approx(0.4, abs=0.005)
    assert np.abs(logs).max() < np.log(1.25) + 0.01
    assert logs.mean() == pytest.approx(0, abs=0.005)
    assert windows.flips.mean() == pytest.approx(0.3, abs=0.015)


def test_where_no_draw_fits_the_largest_centred_window_is_taken():
    windows = draw([(1000, 10)], [0], scale=(0.9, 1.0), ratio=(0.9, 1.1))
    assert rows(windows)[0][:4] == [0, 494, 10, 11]


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(500, 375, [23, 86, 328, 328]), (64, 64, [4, 4, 56, 56]), (1, 1, [0, 0, 1, 1]), (10, 1000, [496, 0, 9, 9])],
)
def test_the_centre_window_is_what_resize_and_crop_would_keep(width, height, expected):
    windows = plan_centre_windows(np.array([width]), np.array([height]), size=224, resize=256)
    found = rows(windows)[0][:4]
    assert np.abs(np.array(found) - expected).max() <= 1
    assert found[0] + found[2] <= height
    assert found[1] + found[3] <= width


def test_the_whole_of_a_square_image_is_kept_when_nothing_is_cropped():
    windows = plan_centre_windows(np.array([64]), np.array([64]), size=64, resize=64)
    assert rows(windows)[0] == [0, 0, 64, 64, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"scale": (0, 1)},
        {"scale": (0.5, 1.5)},
        {"scale": (0.6, 0.5)},
        {"ratio": (2, 1)},
        {"flip": 1.5},
        {"brightness": -0.1},
        {"contrast": float("inf")},
        {"saturation": float("nan")},
        {"hue": 0.6},
        {"hue": -0.1},
        {"evaluation": "exact"},
    ],
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        AugmentConfig(**options)


def test_seed_and_epoch_are_not_added():
    sizes = [(500, 375)] * 50
    assert rows(draw(sizes, range(50), 3, 5)) != rows(draw(sizes, range(50), 4, 4))


def test_windows_reach_every_edge_of_the_image():
    windows = draw([(10, 10)] * 1000, range(1000), scale=(0.25, 0.25), ratio=(1, 1))
    for starts in windows.starts.T:
        assert set(starts.tolist()) == set(range(6))


def test_place_size_and_flip_of_a_window_are_independent():
    windows = draw([(1000, 1000)] * 20_000, range(20_000), scale=(0.2, 0.6), ratio=(0.8, 1.25))
    heights, widths = windows.shapes.T.astype(float)
    tops, lefts = windows.starts.T / (1000 - windows.shapes.T + 1)
    numbers = np.stack([tops, lefts, heights * widths, widths / heights, windows.flips])
    assert np.abs(np.corrcoef(numbers) - np.eye(5)).max() < 0.05


spreads = st.fixed_dictionaries(
    {name: st.floats(0, 3) for name in ("brightness", "contrast", "saturation")} | {"hue": st.floats(0, 0.5)}
)


def colour_rows(positions, seed=0, epoch=0, **options):
    drawn = plan_colours(np.asarray(positions), seed=seed, epoch=epoch, config=AugmentConfig(**options))
    return np.column_stack([drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue, drawn.sequence])


@examples(100)
@given(spreads, st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_colour_factors_lie_in_their_range_and_each_change_comes_once(options, seed, epoch):
    found = colour_rows(range(50), seed, epoch, **options)
    for column, name in enumerate(("brightness", "contrast", "saturation")):
        assert found[:, column].min() >= max(0, 1 - options[name])
        assert found[:, column].max() <= 1 + options[name]
    assert np.abs(found[:, 3]).max() <= options["hue"]
    assert (np.sort(found[:, 4:], axis=1) == range(4)).all()


@examples(50)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=40), st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_colours_and_random_numbers_of_a_position_do_not_depend_on_its_batch(positions, seed, epoch):
    options = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    together = colour_rows(positions, seed, epoch, **options)
    numbers = [generator.random(3).tolist() for generator in generators(seed, epoch, np.array(positions))]
    for index, position in enumerate(positions):
        assert np.array_equal(colour_rows([position], seed, epoch, **options)[0], together[index])
        (alone,) = generators(seed, epoch, np.array([position]))
        assert alone.random(3).tolist() == numbers[index]


def test_colour_factors_are_distributed_evenly_and_independently_of_each_other_and_of_windows():
    options = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    found = colour_rows(range(20_000), **options)
    assert found[:, :4].mean(axis=0) == pytest.approx([1, 1, 1, 0], abs=0.01)
    assert found[:, :4].std(axis=0) == pytest.approx(np.array([0.8, 0.8, 0.8, 0.2]) / np.sqrt(12), rel=0.02)
    counts = np.bincount((found[:, 4:] @ [64, 16, 4, 1]).astype(int))
    assert len(counts[counts > 0]) == 24
    assert counts[counts > 0].min() > 700
    windows = draw([(1000, 1000)] * 20_000, range(20_000))
    numbers = np.column_stack([found[:, :5], windows.starts, windows.shapes, windows.flips]).T
    correlations = np.corrcoef(numbers)[:5] - np.eye(10)[:5]
    assert np.abs(correlations).max() < 0.05


def test_colours_change_with_seed_and_epoch_and_leave_windows_alone():
    assert not np.array_equal(colour_rows(range(5), 1, 0, hue=0.1), colour_rows(range(5), 0, 0, hue=0.1))
    assert not np.array_equal(colour_rows(range(5), 0, 1, hue=0.1), colour_rows(range(5), 0, 0, hue=0.1))
    sizes = [(500, 375)] * 50
    assert rows(draw(sizes, range(50), brightness=0.4, hue=0.1)) == rows(draw(sizes, range(50)))


def test_neighbouring_positions_epochs_and_seeds_share_no_random_numbers():
    firsts = [
        generator.random(40).tolist()
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
        for generator in generators(seed, epoch, np.arange(100))
    ]
    assert len({number for numbers in firsts for number in numbers}) == 3 * 100 * 40


def test_without_a_spread_colours_are_left_alone():
    assert not AugmentConfig().changes_colours
    assert AugmentConfig(hue=0.1).changes_colours
    assert AugmentConfig(saturation=0.1).changes_colours
    assert (colour_rows(range(5))[:, :4] == [1, 1, 1, 0]).all()
