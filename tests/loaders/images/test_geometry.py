"""Images, masks, boxes and keypoints of a sample follow one window and one flip: what is painted is found again."""

import io
import re
from functools import partial
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageDraw

from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import AugmentConfig, DataRanks, DecodeConfig, DecodeGroup, ImageLoader, ObjectConfig
from datasvc.loaders.augment.objects import View, draw_masks
from datasvc.loaders.decode.choice.choose import plan_candidates
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.samples import jpeg

NUM, SIZE = 24, 96
COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)


def png(pixels, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels, **options).save(buffer, "png")
    return buffer.getvalue()


def scene(seed):
    """Return a painted picture: three rectangles that do not overlap, one a column, in an image, a mask and boxes."""
    random = np.random.default_rng(seed)
    width, height = random.integers(150, 400, 2).tolist()
    image, mask, boxes = np.zeros((height, width, 3), np.uint8), np.zeros((height, width), np.uint8), []
    for number in range(3):
        left, right = np.sort(random.integers(number * width // 3, (number + 1) * width // 3, 2)).tolist()
        top, bottom = np.sort(random.integers(0, height, 2)).tolist()
        right, bottom = max(right, left + 8), max(bottom, top + 8)
        image[top:bottom, left:right], mask[top:bottom, left:right] = COLOURS[number], number + 1
        boxes.append([float(left), float(top), float(min(right, width)), float(min(bottom, height))])
    return image, mask, boxes


def sample(seed):
    image, mask, boxes = scene(seed)
    points = [[(left + right) / 2, (top + bottom) / 2, 2.0, left, top, 1.0] for left, top, right, bottom in boxes]
    half = np.asarray(Image.fromarray(image).resize((image.shape[1] // 2, image.shape[0] // 2)))
    return {
        "key": f"{seed:04d}",
        "image": png(image),
        "right": png(image),
        "half": png(half),
        "seg": png(mask),
        "boxes": boxes,
        "box_labels": [0, 1, 2],
        "keypoints": points,
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Repository.create(str(tmp_path_factory.mktemp("geometry") / "repo"))


@pytest.fixture(scope="module")
def split(shared):
    return write(shared, "scenes", [sample(seed) for seed in range(NUM)])


def write(repository, name, samples):
    ingest(repository, samples, name)
    return open_dataset(repository, name)["train"]


POINTS = ObjectConfig(num_keypoints=2, flip_pairs=((0, 1),))


def make(split, **options):
    options = {"masks": ("seg",), "boxes": "boxes", "keypoints": "keypoints", "objects": POINTS, **options}
    defaults = {"batch_size": 8, "training": True, "size": SIZE, "pixels": "uint8", "ranks": DataRanks(), "seed": 5}
    return ImageLoader(split, **{**defaults, "decode": DecodeConfig(num_threads=1), **options})


def inside(box):
    """Return the pixels of the output whose centres are in a box, `bool[SIZE, SIZE]`."""
    centres = np.arange(SIZE) + 0.5
    columns, rows = (centres >= box[0]) & (centres < box[2]), (centres >= box[1]) & (centres < box[3])
    return rows[:, None] & columns


def iou(first, second):
    return (first & second).sum() / max((first | second).sum(), 1)


def check_painted(batch, least=0.82):
    """Compare the boxes of a batch with the colours of its images and the numbers of its masks; return the number."""
    images, mask = batch.images.numpy().transpose(0, 2, 3, 1), batch.masks["seg"].numpy()
    checked = 0
    for index, target in enumerate(batch.targets):
        for box, label in zip(target["boxes"].numpy(), target["labels"].tolist(), strict=True):
            # An edge may lie exactly on the centres of pixels, which then belong to either side.
            painted, margin = mask[index] == label + 1, np.array([1e-3, 1e-3, -1e-3, -1e-3])
            assert (inside(box + margin) <= painted).all()
            assert (painted <= inside(box - margin)).all()
            # A filter mixes the pixels at an edge: half of the colour is the edge.
            if min(box[2:] - box[:2]) >= 12:
                assert iou(inside(box), images[index, :, :, label] >= 128) >= least
            checked += 1
    return checked


def check_epochs(split, count, **options):
    checked = 0
    config = AugmentConfig(scale=(0.2, 1.0), ratio=(0.5, 2.0))
    with make(
        split, augment=config, objects=ObjectConfig(min_visible=0.3, min_side=4), keypoints=None, **options
    ) as loader:
        while checked < count:
            for batch in loader:
                checked += check_painted(batch)
    return checked


@pytest.mark.parametrize("decode", ["cpu", "pillow"])
def test_boxes_and_masks_are_where_the_picture_shows_them(split, decode):
    check_epochs(split, 400, decode=decode)


@pytest.mark.slow
def test_boxes_and_masks_are_where_the_picture_shows_them_in_ten_thousand_draws(split):
    check_epochs(split, 10_000, batch_size=24, decode=DecodeConfig(num_threads=2))


@pytest.mark.parametrize("evaluation", ["torchvision", "window", "whole"])
def test_evaluation_crops_boxes_and_masks_as_images(split, evaluation):
    config = AugmentConfig(evaluation=evaluation, resize=SIZE + 8)
    with make(split, training=False, augment=config, keypoints=None, objects=ObjectConfig(min_side=4)) as loader:
        num_boxes = sum(check_painted(batch) for batch in loader)
        assert not any(batch.flips.any() for batch in loader)
    assert num_boxes > 2 * NUM if evaluation == "whole" else 0 < num_boxes < 3 * NUM


def test_boxes_are_those_of_the_formulas_of_torchvision(split):
    """`resized_crop` of boxes is a crop, clamped, then a resize; `horizontal_flip` is `w - x`."""
    with make(split, objects=ObjectConfig(min_visible=0, flip_pairs=(), num_keypoints=2)) as loader:
        for batch in loader:
            for index, target in enumerate(batch.targets):
                left, top, right, bottom = batch.windows[index]
                boxes = torch.tensor(batch.sample(index)["boxes"], dtype=torch.float64) - torch.tensor(
                    [left, top] * 2
                )
                boxes[:, 0::2] = boxes[:, 0::2].clamp(0, right - left) * SIZE / (right - left)
                boxes[:, 1::2] = boxes[:, 1::2].clamp(0, bottom - top) * SIZE / (bottom - top)
                if batch.flips[index]:
                    boxes[:, [0, 2]] = SIZE - boxes[:, [2, 0]]
                kept = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
                torch.testing.assert_close(target["boxes"], boxes[kept].float(), rtol=0, atol=1e-4)
                assert torch.equal(target["labels"], torch.arange(3)[kept])
                assert torch.equal(target["numbers"], torch.arange(3)[kept])


def test_keypoints_move_with_their_boxes_and_change_places_at_a_flip(split):
    seen = set()
    with make(split, objects=ObjectConfig(min_visible=0, num_keypoints=2, flip_pairs=((0, 1),))) as loader:
        for batch in loader:
            for index, target in enumerate(batch.targets):
                assert len(target["keypoints"]) == len(target["boxes"])
                flip = bool(batch.flips[index])
                stored = np.array(batch.sample(index)["keypoints"])[target["numbers"].numpy()].reshape(-1, 2, 3)
                left, top, right, bottom = batch.windows[index]
                for own, found in zip(stored, target["keypoints"].numpy(), strict=True):
                    for (x, y, visible), (found_x, found_y, found_visible) in zip(
                        own, found[::-1] if flip else found, strict=True
                    ):
                        is_inside = left <= x <= right and top <= y <= bottom
                        assert found_visible == (visible if is_inside else 0)
                        expected = (x - left) * SIZE / (right - left)
                        expected = SIZE - expected if flip else expected
                        expected_y = (y - top) * SIZE / (bottom - top)
                        assert abs(found_x - (expected if is_inside else 0)) < 1e-3
                        assert abs(found_y - (expected_y if is_inside else 0)) < 1e-3
                        seen.add((flip, is_inside))
    assert len(seen) == 4


@pytest.mark.parametrize("training", [True, False])
def test_all_images_of_a_sample_show_the_same_part_of_the_scene(split, training):
    config = AugmentConfig(brightness=0.4, contrast=0.3)
    options = {"images": ("image", "right", "half"), "training": training, "augment": config}
    with make(split, **options) as loader, make(split, training=training, augment=config) as alone:
        for batch, single in zip(loader, alone, strict=True):
            assert torch.equal(batch.images, single.images)
            assert torch.equal(batch.views["image"], batch.images)
            assert torch.equal(batch.views["right"], batch.images)
            # Half of the pixels: the same scene, less sharp.
            difference = (batch.views["half"].float() - batch.images.float()).abs().mean(dim=(1, 2, 3))
            assert difference.max() < 12
            other = (batch.views["half"].roll(1, 0).float() - batch.images.float()).abs().mean(dim=(1, 2, 3))
            assert other.mean() > 2 * difference.max()


def test_images_without_a_stored_size_are_read_by_their_headers(shared):
    samples = [{key: value for key, value in sample(seed).items() if key != "image"} for seed in range(8)]
    plain = write(shared, "pairs", samples)
    assert "width" not in plain.table.sample_schema.names
    options = {"images": ("right", "half"), "batch_size": 8, "keypoints": None, "objects": ObjectConfig(min_side=4)}
    with make(plain, **options) as loader:
        assert check_painted(next(iter(loader))) > 0
    with pytest.raises(ConfigError, match=r"has no images; its columns are .*'right'"):
        make(plain)


def contents(batch):
    tensors = {"images": batch.images, **batch.views, **batch.masks, **batch.objects}
    return {name: value.numpy().tobytes() for name, value in tensors.items()} | {"windows": batch.windows.tobytes()}


def test_a_resumed_run_at_another_size_gives_every_sample_what_it_had(split):
    options = {"images": ("image", "half"), "augment": AugmentConfig(brightness=0.2)}

    def per_sample(batch):
        for index, target in enumerate(batch.targets):
            parts = [batch.images[index], batch.views["half"][index], batch.masks["seg"][index], *target.values()]
            yield batch.epoch, int(batch.positions[index]), [part.numpy().tobytes() for part in parts]

    with make(split, **options) as loader:
        whole = [each for _ in range(2) for batch in loader for each in per_sample(batch)]
        resumed = []
    with make(split, **options) as loader:
        for batch in loader:
            resumed += per_sample(batch)
            break
        state = loader.state_dict()
    for rank in range(2):
        with make(
            split, **options, batch_size=4, ranks=DataRanks(rank, 2), decode=DecodeConfig(num_threads=3)
        ) as loader:
            loader.load_state_dict(state)
            resumed += [each for _ in range(2) for batch in loader for each in per_sample(batch)]
    assert sorted(resumed) == sorted(whole)


def test_numpy_batches_and_targets_are_those_of_torch(split):
    with make(split) as loader, make(split) as other:
        for batch, arrays in zip(loader, other.numpy(), strict=True):
            for name, value in batch.objects.items():
                assert np.array_equal(value.numpy(), arrays.objects[name])
            assert np.array_equal(batch.masks["seg"].numpy(), arrays.masks["seg"])
            assert len(batch.targets) == len(arrays.targets) == 8
            moved = batch.to("cpu")
            assert torch.equal(moved.objects["boxes"], batch.objects["boxes"])


MASKING = DecodeConfig(num_threads=1, on_bad="mask")


def star(random, width, height):
    """Return a polygon that is not convex, as a list of x and y."""
    angles, radius = np.linspace(0, 2 * np.pi, 12, endpoint=False), np.array([0.2, 0.5] * 6)
    centre, sides = random.uniform(0.3, 0.7, 2) * (width, height), np.array([width, height])
    return (centre + np.stack([np.cos(angles), np.sin(angles)], 1) * radius[:, None] * sides).reshape(-1).tolist()


def drawn(seed):
    random = np.random.default_rng(seed)
    width, height = random.integers(150, 400, 2).tolist()
    mask, polygons = Image.new("L", (width, height)), [star(random, width, height), [1.0, 1.0, 9.0, 1.0, 9.0, 9.0]]
    for polygon in polygons:
        ImageDraw.Draw(mask).polygon((np.array(polygon) - 0.5).tolist(), 1)
    points = np.array(polygons[0]).reshape(-1, 2)
    box = [*points.min(0).clip(0), *np.minimum(points.max(0), (width, height))]
    seg = np.asarray(mask)
    columns = {"seg": png(seg), "boxes": [[0.0, 0.0, -9.0, 0.0], box], "polygons": [[[5.0, 5.0]], polygons]}
    return {"key": f"{seed:04d}", "image": png(seg[..., None].repeat(3, 2) * 255), **columns}


def test_masks_of_polygons_are_where_the_picture_shows_them(shared):
    split = write(shared, "polygons", [drawn(seed) for seed in range(NUM)])
    plain = {"keypoints": None, "objects": None, "polygons": "polygons"}
    checked = []
    with make(split, augment=AugmentConfig(scale=(0.2, 1.0), ratio=(0.5, 2.0)), **plain) as loader:
        assert loader.settings["polygons"] == "polygons"
        for _ in range(3):
            for batch in loader:
                for index, target in enumerate(batch.targets):
                    painted = batch.masks["seg"][index].numpy() > 0
                    assert target["masks"].dtype == torch.uint8
                    assert target["masks"].shape == (len(target["boxes"]), SIZE, SIZE)
                    assert target["numbers"].tolist() == [1] * len(target["boxes"])
                    if painted.mean() > 0.1 and len(target["boxes"]):
                        checked.append(iou(target["masks"][0].numpy() > 0, painted))
    assert len(checked) > NUM
    assert min(checked) > 0.9
    assert np.mean(checked) > 0.97


def mask_of(polygons, view):
    (has_polygons,), (mask,) = draw_masks([polygons], view)
    assert has_polygons
    return mask


def test_a_polygon_has_the_pixels_whose_centres_are_inside():
    view = View(np.array([0.0, 0.0, 8.0, 8.0]), flip=False, width=8, height=8, shown=(8, 8))
    expected = np.zeros((8, 8), np.uint8)
    expected[2:5, 1:6] = 1
    assert (mask_of([[1.0, 2.0, 6.0, 2.0, 6.0, 5.0, 1.0, 5.0]], view) == expected).all()
    expected[3:7, 4:8] = 1  # another polygon, which leaves the picture, and overlaps the first
    polygons = [[1.4, 1.6, 6.4, 1.6, 6.4, 5.4, 1.4, 5.4], [4.0, 3.0, 90.0, 3.0, 90.0, 7.0, 4.0, 7.0]]
    assert (mask_of(polygons, view) == expected).all()
    flipped = View(view.region, flip=True, width=8, height=8, shown=(8, 8))
    assert (mask_of(polygons, flipped)[:, ::-1] == mask_of(polygons, view)).all()
    assert not mask_of([[], [1.0, 1.0], [1.0, 1.0, 5.0, 5.0]], view).any()
    for polygon, reason in (
        ([1.0, 2.0, 3.0], "no list of x and y"),
        ([1.0, "x"], "no list of x and y"),
        ([1.0, None, 3.0, 4.0, 5.0, 6.0], "not finite"),
        ([1.0, 2.0, float("nan"), 4.0, 5.0, 6.0], "not finite"),
        ([1.0, 2.0, 1e308, 4.0, 5.0, 1e300], "not finite"),
    ):
        with pytest.raises(BadSampleError, match=reason):
            draw_masks([[polygon]], view)
    with pytest.raises(BadSampleError, match="would take more than"):
        draw_masks([[[1.0, 2.0]]] * 200, View(view.region, flip=False, width=8, height=8, shown=(4096, 4096)))


def test_objects_without_polygons_are_left_out_and_samples_without_their_list_are_bad(shared):
    square = [[1.0, 1.0, 90.0, 1.0, 90.0, 90.0, 1.0, 90.0]]
    boxes = [[0.0, 0.0, 50.0, 50.0], [10.0, 10.0, 90.0, 90.0], [20.0, 20.0, 99.0, 99.0]]
    kept = {"boxes": boxes, "box_labels": [0, 1, 2], "polygons": [square, [], square]}
    split = one(shared, "some-polygons", **kept)
    objects = ObjectConfig(min_visible=0)
    batch, index = load(split, keypoints=None, objects=objects, masks=(), polygons="polygons", decode=MASKING)
    target = batch.targets[index]
    assert target["labels"].tolist() == [0, 2]
    assert target["numbers"].tolist() == [0, 2]
    assert target["masks"].sum(dim=(1, 2)).tolist() == [target["masks"][0].sum()] * 2
    assert sorted(batch.bad) == sorted(set(range(4)) - {index})
    assert all("ingested without polygons" in reason for reason in batch.bad.values())


BAD_BOXES = [[10.0, 10.0, 10.0, 40.0], [-50.0, 0.0, -10.0, 20.0], [float("nan")] * 4, [30.0, 30.0, 20.0, 20.0]]


def one(repository, name, **changes):
    return write(repository, name, [{**sample(0), **changes}, *[sample(seed) for seed in range(1, 4)]])


def load(split, **options):
    with make(split, batch_size=4, training=False, augment=AugmentConfig(evaluation="whole"), **options) as loader:
        batch = next(iter(loader))
        return batch, batch.keys.index("0000") if "0000" in batch.keys else 0  # the ingest changes the order


def test_a_batch_without_any_box_has_empty_targets(split):
    with make(split, objects=ObjectConfig(min_side=SIZE + 1), keypoints=None) as loader:
        batch = next(iter(loader))
    assert [target["boxes"].shape for target in batch.targets] == [(0, 4)] * 8
    with make(split, boxes=None, keypoints=None, objects=None) as loader:
        assert next(iter(loader)).targets == [{}] * 8


def test_jobs_of_a_decode_group_share_boxes_and_masks_if_they_read_the_same(split):
    group = DecodeGroup(f"geometry-{uuid4().hex}", lag=20)
    with make(split, decode_group=group) as first, make(split, decode_group=group) as second:
        for batch, other in zip([*first], [*second], strict=True):
            assert contents(batch) == contents(other)
        assert second.sharing.counts.shared == len(second)
        for changes in ({"masks": ()}, {"objects": ObjectConfig(num_keypoints=2, flip_pairs=())}):
            message = rf"{next(iter(changes))} is .* here and .* there"
            with make(split, decode_group=group, **changes) as third, pytest.raises(ConfigError, match=message):
                next(iter(third))


def test_bad_boxes_are_dropped_and_counted_masked_or_raised_as_chosen(shared):
    good = sample(0)["boxes"]
    bad = one(shared, "bad-boxes", boxes=[*good, *BAD_BOXES], box_labels=[0, 1, 2, 9, 9, 9, 9], keypoints=None)
    batch, first = load(bad, keypoints=None, objects=None)
    assert batch.num_bad_boxes == len(BAD_BOXES)
    assert batch.targets[first]["labels"].tolist() == [0, 1, 2]
    batch, first = load(bad, keypoints=None, objects=ObjectConfig(on_bad="mask"), decode=DecodeConfig(on_bad="mask"))
    assert re.search("'0000'.*box 3", batch.bad[first])
    assert batch.mask.tolist() == [index != first for index in range(4)]
    assert not batch.images[first].any()
    assert not batch.masks["seg"][first].any()
    assert first not in batch.objects["samples"].tolist()
    with pytest.raises(BadSampleError, match=r"'0000'.*box 3.*on_bad='drop'"):
        load(bad, keypoints=None, objects=ObjectConfig(on_bad="raise"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boxes": [[1.0, 2.0, 3.0]]}, "its lists differ in length"),
        ({"boxes": [[1.0, 2.0, 3.0]] * 3}, "four numbers"),
        ({"box_labels": [1]}, "its lists differ in length"),
        ({"keypoints": None}, "its list of keypoints is null"),
        ({"keypoints": [[1.0, 2.0, 2.0]] * 3}, "2 times x, y and visibility"),
        ({"seg": png(scene(0)[1][:, :99])}, "seg: is 99x.* does not fit its image"),
        ({"seg": png(scene(0)[0])}, "seg: has pixels of the mode RGB"),
        ({"seg": jpeg()}, "seg: is a JPEG"),
    ],
)
def test_damaged_annotations_are_raised_or_masked_and_named(shared, changes, reason):
    name = f"damaged-{abs(hash(reason))}"
    split = one(shared, name, **changes)
    with pytest.raises(BadSampleError, match=f"'0000'.*{reason}"):
        load(split)
    batch, first = load(split, decode=DecodeConfig(on_bad="mask"))
    assert list(batch.bad) == [first]
    assert set(batch.objects["samples"].tolist()) == {0, 1, 2, 3} - {first}


def test_samples_without_boxes_are_served(shared):
    split = one(shared, "empty", boxes=[], box_labels=[], keypoints=[])
    batch, first = load(split)
    assert batch.targets[first]["boxes"].shape == (0, 4)
    assert batch.targets[first]["keypoints"].shape == (0, 2, 3)
    assert len(batch.targets[first - 1]["boxes"]) == 3


def test_palettes_and_sixteen_bits_keep_their_numbers_also_in_a_smaller_mask(shared):
    _, mask, _ = scene(0)
    palette = Image.fromarray(mask, "P")
    palette.putpalette([0, 0, 0, 200, 10, 10, 10, 200, 10, 10, 10, 200])
    buffer = io.BytesIO()
    palette.save(buffer, "png")
    wide = mask.astype(np.uint16) * 1000
    expected = found_mask(one(shared, "plain-mask"))
    for name, content, factor in (
        ("palette", buffer.getvalue(), 1),
        ("wide", png(wide), 1000),
        ("small", png(mask[::2, ::2]), 1),
    ):
        found = found_mask(one(shared, name, seg=content))
        assert set(found.unique().tolist()) == {0, factor, 2 * factor, 3 * factor}
        assert (found == expected * factor).float().mean() > (0.97 if name == "small" else 0.9999)


def found_mask(split):
    batch, first = load(split, keypoints=None, objects=None)
    return batch.masks["seg"][first]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boxes": "box_labels"}, "not a list of lists"),
        ({"boxes": "nothing"}, "nothing"),
        ({"masks": ("boxes",)}, "does not hold encoded masks"),
        ({"images": ("image", "seg")}, "each column once"),
        ({"objects": ObjectConfig(num_keypoints=2)}, "flip_pairs"),
        ({"objects": ObjectConfig(flip_pairs=())}, "num_keypoints"),
        ({"objects": ObjectConfig(flip_pairs=((0, 7),), num_keypoints=2)}, "2 keypoints"),
        ({"boxes": None, "keypoints": None}, "objects is given"),
        ({"polygons": "boxes"}, "no list of polygons per object"),
    ],
)
def test_wrong_arguments_are_refused(split, options, message):
    with pytest.raises(ConfigError, match=message):
        make(split, **options)


def test_several_images_are_decoded_on_the_cpu_also_for_a_gpu():
    plan = partial(plan_candidates, on_gpu=True, has_transform=False, missing={})
    assert plan("auto", has_other_images=True) == ["cpu"]
    assert len(plan("auto")) == 3  # masks and boxes alone leave the choice
    with pytest.raises(ConfigError, match="decoded on the CPU"):
        plan("gpu", has_other_images=True)


def test_boxes_of_fixed_length_and_of_parquet_files_are_read(shared, tmp_path):
    samples = [sample(seed) for seed in range(4)]
    table = pa.table({name: [each[name] for each in samples] for name in ("image", "seg", "boxes", "box_labels")})
    fixed = table.column("boxes").cast(pa.list_(pa.list_(pa.float32(), 4)))
    pq.write_table(table.set_column(2, "boxes", fixed), tmp_path / "train.parquet")
    split = write(shared, "parquet", str(tmp_path))
    batch, _ = load(split, keypoints=None, objects=None)
    assert check_painted(batch) == 12
