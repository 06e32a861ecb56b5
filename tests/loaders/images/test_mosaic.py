"""A mosaic shows parts of the four images of its group, with what is painted in them, at any number of ranks."""

import dataclasses

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.loaders import (
    AugmentConfig,
    DataRanks,
    DecodeConfig,
    Fit,
    ImageLoader,
    Masked,
    ObjectConfig,
    OrderConfig,
    PixelFormat,
    VideoLoader,
)
from datasvc.loaders.images import annotations
from datasvc.repository import Repository
from tests.loaders.images.test_geometry import SIZE, inside, write
from tests.loaders.images.test_own_sizes import outlined

NUM = 24
LAYERS = {"masks": ("seg",), "boxes": "boxes", "keypoints": "keypoints", "polygons": "polygons"}
OBJECTS = ObjectConfig(num_keypoints=2, flip_pairs=((0, 1),), min_visible=0.05)
MOSAIC = AugmentConfig(scale=(0.5, 1.0), ratio=(0.7, 1.4), brightness=0.2, mosaic=0.8)
MASKING = DecodeConfig(num_threads=1, on_bad="mask")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Repository.create(str(tmp_path_factory.mktemp("mosaic") / "repo"))


@pytest.fixture(scope="module")
def split(shared):
    return write(shared, "scenes", [outlined(seed) for seed in range(NUM)])


def make(split, **options):
    defaults = {"batch_size": 8, "training": True, "size": SIZE, "pixels": "uint8", "ranks": DataRanks(), "seed": 5}
    layers = {**LAYERS, "objects": OBJECTS, "decode": DecodeConfig(num_threads=2), "augment": MOSAIC}
    return ImageLoader(split, **{**defaults, **layers, **options})


def area(tile):
    """Return the pixels of a tile in its output, `bool[SIZE, SIZE]`."""
    found = np.zeros((SIZE, SIZE), np.bool_)
    found[tile.rows, tile.columns] = True
    return found


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_each_tile_is_the_part_of_its_image_that_touches_the_centre(split, layout):
    options = {"pixels": PixelFormat("uint8", layout), "images": ("image", "half")}
    num_mosaics = 0
    with (
        make(split, **options) as loader,
        make(split, **options, augment=dataclasses.replace(MOSAIC, mosaic=0)) as single,
    ):
        for batch, plain in zip(loader, single, strict=True):
            assert plain.mosaics is None
            for index in range(8):
                tiles = list(batch.mosaics.tiles(index))
                assert np.array_equal(sum(area(tile).astype(int) for tile in tiles), np.ones((SIZE, SIZE)))
                x, y = batch.mosaics.centres[index].tolist()
                positions = {int(batch.positions[tile.source]) for tile in tiles}
                if len(tiles) == 1:
                    assert positions == {int(batch.positions[index])}
                else:
                    first = int(batch.positions[index]) // 4 * 4
                    assert positions == set(range(first, first + 4))
                    assert SIZE // 4 <= min(x, y) <= max(x, y) <= SIZE * 3 // 4
                    num_mosaics += 1
                for tile in tiles:
                    # What meets at the centre are corners of the images.
                    assert tile.source_columns.stop == SIZE or tile.columns.start == x
                    assert tile.source_rows.start == 0 or tile.rows.stop == y
                    at, of = (tile.rows, tile.columns), (tile.source_rows, tile.source_columns)
                    for name, images in plain.views.items():
                        axes = (slice(None),) * (layout == "NCHW")
                        shown = batch.views[name][(index, *axes, *at)]
                        assert torch.equal(shown, images[(tile.source, *axes, *of)])
                    mask = batch.masks["seg"][(index, *at)]
                    assert torch.equal(mask, plain.masks["seg"][(tile.source, *of)])
    assert 0 < num_mosaics < NUM


def test_objects_are_where_the_picture_shows_them(split):
    num_checked, flips = 0, set()
    with make(split) as loader:
        for batch in [*loader, *loader, *loader]:
            for index, target in enumerate(batch.targets):
                shown = {tile.source: tile for tile in batch.mosaics.tiles(index)}
                tiles = {source: area(tile) for source, tile in shown.items()}
                seen = []
                for row, origin in enumerate(target["origins"].tolist()):
                    label, box = int(target["labels"][row]), target["boxes"][row].numpy()
                    painted = (batch.masks["seg"][index].numpy() == label + 1) & tiles[origin]
                    margin = np.array([1e-3, 1e-3, -1e-3, -1e-3])
                    assert (inside(box + margin) <= painted).all()
                    assert (painted <= inside(box - margin)).all()
                    assert (target["masks"][row].numpy() != painted).sum() <= 2 * SIZE  # centres on an edge
                    assert not (target["masks"][row].numpy() > tiles[origin]).any()
                    for x, y, visible in target["keypoints"][row].tolist():
                        rows, columns = shown[origin].rows, shown[origin].columns
                        is_inside = columns.start <= x <= columns.stop and rows.start <= y <= rows.stop
                        assert is_inside if visible else (x, y) == (0, 0)
                    seen.append((origin, label))
                    flips.add(bool(batch.flips[origin]))
                    num_checked += 1
                for source, tile in tiles.items():
                    for label in range(3):
                        if (source, label) not in seen:  # what is left out is less than `min_visible` of a box
                            assert ((batch.masks["seg"][index].numpy() == label + 1) & tile).sum() < 400
    assert num_checked > 3 * NUM
    assert flips == {False, True}


def test_a_box_too_thin_for_its_place_in_the_mosaic_is_dropped(shared):
    """In float32, a box of 1e-7 pixels has an area at the left edge of an output, and none in the middle."""
    boxes = [[1e-3, 0.0, 1e-3 + 1e-7, 400.0]]
    split = write(shared, "thin", [{**outlined(seed), "boxes": boxes, "box_labels": [0]} for seed in range(8)])
    config = AugmentConfig(scale=(1.0, 1.0), ratio=(0.1, 10.0), flip=0.0, mosaic=0.5)
    with make(
        split,
        augment=config,
        objects=ObjectConfig(min_visible=0.0),
        boxes="boxes",
        masks=(),
        keypoints=None,
        polygons=None,
    ) as loader:
        batch = next(iter(loader))
    sides = batch.objects["boxes"][:, 2:] - batch.objects["boxes"][:, :2]
    assert (sides > 0).all()
    assert 0 < len(sides) < 8


def test_keypoints_follow_their_boxes(split):
    """The first keypoint is the centre of its box, so it is where a box that the tile does not cut has its centre."""
    num_checked = 0
    with make(split, augment=dataclasses.replace(MOSAIC, scale=(1.0, 1.0), flip=0.5)) as loader:
        for batch in [*loader, *loader]:
            for index, target in enumerate(batch.targets):
                tiles = {tile.source: tile for tile in batch.mosaics.tiles(index)}
                for row, origin in enumerate(target["origins"].tolist()):
                    left, top, right, bottom = target["boxes"][row].tolist()
                    x, y, visible = target["keypoints"][row, 1 if batch.flips[origin] else 0].tolist()
                    tile = tiles[origin]
                    is_whole = tile.columns.start < left and right < tile.columns.stop
                    if is_whole and tile.rows.start < top and bottom < tile.rows.stop:
                        at_edge = batch.sample(origin)["boxes"][int(target["numbers"][row])]
                        if min(at_edge[0], at_edge[1]) > 0 and visible:
                            assert abs(x - (left + right) / 2) < 1e-3
                            assert abs(y - (top + bottom) / 2) < 1e-3
                            num_checked += 1
    assert num_checked > 10


def per_sample(batch):
    for index, target in enumerate(batch.targets):
        of = [int(batch.positions[source]) for source in batch.mosaics.sources[index]]
        values = [value for name, value in target.items() if name != "origins"]
        parts = [batch.images[index], batch.masks["seg"][index], *values]
        if batch.mask[index]:
            yield batch.epoch, int(batch.positions[index]), of, [part.numpy().tobytes() for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("order", [{"shuffle": "global"}, {"order": OrderConfig(5, "windowed", 8, 2)}])
def test_a_resumed_run_at_another_size_has_equal_mosaics_also_at_the_end_of_an_epoch(shared, order):
    split = write(shared, f"part-{'-'.join(order)}", [outlined(seed) for seed in range(22)])
    options = {"tail": "pad", **order} | ({"seed": None} if "order" in order else {})
    with make(split, **options) as loader:
        whole = [each for _ in range(2) for batch in loader for each in per_sample(batch)]
    with make(split, **options) as loader:
        resumed = list(per_sample(next(iter(loader))))
        state = loader.state_dict()
    for rank in range(2):
        with make(split, **options, batch_size=4, ranks=DataRanks(rank, 2)) as loader:
            loader.load_state_dict(state)
            resumed += [each for _ in range(2) for batch in loader for each in per_sample(batch)]
    assert sorted(resumed) == sorted(whole)
    assert len(whole) == 2 * 22
    assert {position for epoch, position, of, _ in whole if not epoch and len(set(of)) == 2} <= {20, 21}
    assert any(len(set(of)) == 4 for *_, of, _ in whole)


def test_numpy_batches_have_equal_mosaics(split):
    with make(split) as loader, make(split) as other:
        for batch, arrays in zip(loader, other.numpy(), strict=True):
            assert np.abs(batch.images.numpy().astype(int) - arrays.images).max() <= 2
            assert np.array_equal(batch.masks["seg"].numpy(), arrays.masks["seg"])
            for name, values in batch.objects.items():
                assert np.array_equal(values.numpy(), arrays.objects[name])


def test_a_bad_sample_is_black_and_without_objects_in_all_mosaics(shared):
    samples = [outlined(seed) for seed in range(8)]
    samples[2]["boxes"] = samples[2]["boxes"][:1]  # its lists differ in length
    content = samples[5]["image"]
    samples[5]["image"] = content[:60] + bytes(len(content) - 80) + content[-20:]
    split = write(shared, "bad", samples)
    config = dataclasses.replace(MOSAIC, mosaic=1.0)
    with make(split, decode=MASKING, augment=config) as loader:
        batch = next(iter(loader))
    assert sorted(batch.keys[index] for index in batch.bad) == ["0002", "0005"]
    for index, target in enumerate(batch.targets):
        tiles = list(batch.mosaics.tiles(index))
        assert len(tiles) == (1 if index in batch.bad else 4)
        for tile in tiles:
            if tile.source in batch.bad:
                assert not batch.images[index, :, tile.rows, tile.columns].any()
                assert not batch.masks["seg"][index, tile.rows, tile.columns].any()
        assert not set(target["origins"].tolist()) & batch.bad.keys()


def test_masked_samples_are_black_in_the_mosaics_of_others(split):
    with make(split, augment=dataclasses.replace(MOSAIC, mosaic=1.0), masked=Masked(((0, 1, 2),))) as loader:
        batch = next(iter(loader))
    index = batch.positions.tolist().index(1)
    assert not batch.images[index].any()
    for other in range(4):
        tiles = {tile.source: tile for tile in batch.mosaics.tiles(other)}
        assert len(tiles) == (1 if other == index else 4)
        assert not batch.images[other, :, tiles[index].rows, tiles[index].columns].any()
        assert index not in batch.targets[other]["origins"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6}, "batch_size is 6; a mosaic needs a multiple of 4"),
        ({"ranks": DataRanks(0, 2), "tail": "short"}, "tail is 'short'"),
        ({"ranks": DataRanks(0, 2), "order": OrderConfig(5, "windowed", 4, 1), "seed": None}, "multiple of 8"),
        ({"size": Fit(longer=90), "augment": AugmentConfig(mosaic=1)}, "AugmentConfig\\(mosaic\\) is given"),
        ({"masks": (), "boxes": None, "keypoints": None, "polygons": None, "objects": None}, "without boxes="),
    ],
)
def test_batches_that_divide_groups_are_refused(split, options, message):
    with pytest.raises(ConfigError, match=message):
        make(split, **options)


def test_one_rank_reads_any_number_of_lanes(split):
    with make(split, order=OrderConfig(5, "windowed", 2, 1), seed=None) as loader:
        assert [batch.positions.tolist() for batch in loader] == np.arange(NUM).reshape(3, 8).tolist()


def test_a_run_that_continues_inside_of_a_group_is_refused(split):
    with make(split, augment=AugmentConfig(), batch_size=6) as loader:
        next(iter(loader))
        state = loader.state_dict()
    # Also with few mosaics, of which none is in the first batch.
    with make(split, batch_size=4, augment=dataclasses.replace(MOSAIC, mosaic=1e-6)) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"only a part of the positions 4\.\.7"):
            next(iter(loader))


def test_a_wrong_probability_and_a_mosaic_of_videos_are_refused(split):
    with pytest.raises(ConfigError, match="mosaic is 2; expected a probability"):
        AugmentConfig(mosaic=2)
    with pytest.raises(ConfigError, match="mosaic_epochs is -1"):
        AugmentConfig(mosaic_epochs=-1)
    with pytest.raises(ConfigError, match="has a mosaic"):
        VideoLoader(split, batch_size=4, training=True, frames=2, augment=AugmentConfig(mosaic=0.5))


def test_the_lists_of_a_sample_are_parsed_once_for_all_tiles(split, monkeypatch):
    parsed = []

    def counting(read):
        def count(value, *options):
            parsed.append(isinstance(value, list))
            return read(value, *options)

        return count

    for name in ("read_boxes", "read_keypoints"):
        monkeypatch.setattr(annotations, name, counting(getattr(annotations, name)))
    with make(split, augment=dataclasses.replace(MOSAIC, mosaic=1), decode=DecodeConfig(prefetch=0)) as loader:
        next(iter(loader))
    assert sum(parsed) == 2 * 8
    assert len(parsed) > 2 * 8 * 4
