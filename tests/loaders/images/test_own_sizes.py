"""Images that keep their own shape: a batch is padded to its largest image, and what is painted is found again."""

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.loaders import (
    AugmentConfig,
    DataRanks,
    DecodeConfig,
    DecodeGroup,
    Fit,
    ImageLoader,
    ObjectConfig,
    PixelFormat,
)
from datasvc.loaders.augment.fit import parse_size
from datasvc.repository import Repository
from tests.loaders.images.test_geometry import NUM, iou, sample, scene, write

LAYERS = {"masks": ("seg",), "boxes": "boxes", "keypoints": "keypoints", "polygons": "polygons"}
OBJECTS = ObjectConfig(num_keypoints=2, flip_pairs=((0, 1),))


def outlined(seed):
    """Return a sample whose polygons are the outlines of its boxes."""
    found = sample(seed)
    corners = [[left, top, right, top, right, bottom, left, bottom] for left, top, right, bottom in found["boxes"]]
    return {**found, "polygons": [[outline] for outline in corners]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Repository.create(str(tmp_path_factory.mktemp("sizes") / "repo"))


@pytest.fixture(scope="module")
def split(shared):
    return write(shared, "scenes", [outlined(seed) for seed in range(NUM)])


def make(split, **options):
    defaults = {"batch_size": 4, "training": False, "size": None, "pixels": "uint8", "ranks": DataRanks(), "seed": 5}
    layers = {**LAYERS, "objects": OBJECTS, "decode": DecodeConfig(num_threads=2)}
    return ImageLoader(split, **{**defaults, **layers, **options})


def planar(image, layout):
    return image if layout == "NCHW" else image.permute(2, 0, 1)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("decode", ["cpu", "pillow"])
def test_without_a_size_a_batch_has_the_stored_pixels_boxes_and_masks(split, decode, layout):
    with make(split, decode=decode, pixels=PixelFormat("uint8", layout)) as loader:
        for batch in loader:
            height, width = batch.sizes.max(axis=0)
            assert batch.images.shape[2:4] == (height, width) or layout == "NHWC"
            assert batch.masks["seg"].shape == (4, height, width)
            assert batch.objects["masks"].shape[1:] == (height, width)
            for index, (image, target) in enumerate(zip(batch.unpadded, batch.targets, strict=True)):
                pixels, mask, boxes = scene(int(batch.keys[index]))
                shown = tuple(batch.sizes[index])
                assert np.array_equal(planar(image, layout).permute(1, 2, 0).numpy(), pixels)
                assert planar(batch.images[index], layout).long().sum() == pixels.astype(int).sum()
                assert np.array_equal(batch.masks["seg"][index, : shown[0], : shown[1]].numpy(), mask)
                assert batch.masks["seg"][index].sum() == mask.sum()
                assert np.array_equal(target["boxes"].numpy(), np.array(boxes, np.float32))
                for number, drawn in enumerate(target["masks"].numpy()):
                    assert np.array_equal(drawn, mask == number + 1)


@pytest.mark.parametrize("output", ["float32", "float16", "bfloat16"])
def test_padding_is_zero_and_both_layouts_have_equal_pixels_in_every_output(split, output):
    with (
        make(split, pixels=PixelFormat(output, "NHWC"), training=True) as last,
        make(split, pixels=PixelFormat(output), training=True) as first,
    ):
        for batch, other in zip(first, last, strict=True):
            assert torch.equal(batch.images, other.images.permute(0, 3, 1, 2))
            for index, (height, width) in enumerate(batch.sizes):
                assert not batch.images[index, :, height:].any()
                assert not batch.images[index, :, :, width:].any()
                assert batch.images[index, :, :height, :width].all()  # no level is the mean of its channel


def test_training_draws_the_shorter_side_and_everything_follows_its_flip(split):
    fit = Fit(shorter=(64, 80, 96), longer=150, multiple=32)
    shorter, flips, num_checked = set(), set(), 0
    with make(split, training=True, size=fit, images=("image", "half")) as loader:
        for batch in [*loader, *loader]:
            assert all(side % 32 == 0 for side in batch.images.shape[2:])
            assert batch.views["half"].shape == batch.images.shape
            images = batch.images.numpy()
            for index, target in enumerate(batch.targets):
                height, width = batch.sizes[index]
                own_height, own_width = scene(int(batch.keys[index]))[0].shape[:2]
                sizes = [resized(own_height, own_width, side, 150) for side in (64, 80, 96)]
                assert (height, width) in sizes
                shorter.add(sizes.index((height, width)))
                flips.add(bool(batch.flips[index]))
                for box, label, drawn in zip(target["boxes"], target["labels"], target["masks"], strict=True):
                    left, top, right, bottom = box.tolist()
                    assert right <= width
                    assert bottom <= height
                    rows, columns = (np.arange(side) + 0.5 for side in (height, width))
                    inside = ((rows > top) & (rows < bottom))[:, None] & ((columns > left) & (columns < right))
                    shown = images[index, label, :height, :width] >= 128
                    if min(right - left, bottom - top) >= 10:
                        assert iou(inside, shown) >= 0.75
                        assert iou(inside, batch.masks["seg"][index, :height, :width].numpy() == int(label) + 1) > 0.8
                        assert iou(inside, drawn.numpy() == 1) > 0.8
                        num_checked += 1
                centres = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
                points = target["keypoints"][:, 1 if batch.flips[index] else 0, :2]  # they change places at a flip
                torch.testing.assert_close(points, centres, rtol=0, atol=1e-3)
    assert shorter == {0, 1, 2}
    assert flips == {False, True}
    assert num_checked > NUM


def resized(height, width, size, max_size):
    """Return height and width by the formula of torchvision's `Resize(size, max_size=max_size)`."""
    short, long = min(height, width), max(height, width)
    new_short, new_long = size, int(size * long / short)
    if new_long > max_size:
        new_short, new_long = int(max_size * new_short / new_long), max_size
    return (new_short, new_long) if height <= width else (new_long, new_short)


def test_sizes_are_those_of_torchvision():
    random = np.random.default_rng(0)
    heights, widths = random.integers(1, 5000, (2, 10_000))
    sizes = Fit(shorter=800, longer=1333).sizes(widths, heights, np.full(len(widths), 800))
    expected = [resized(*each, 800, 1333) for each in zip(heights.tolist(), widths.tolist(), strict=True)]
    assert np.array_equal(sizes, np.maximum(expected, 1))
    sizes = Fit(longer=640).sizes(widths, heights, np.ones(len(widths), np.int64))
    assert (sizes.max(axis=1) == 640).all()
    assert np.abs(sizes[:, 0] * widths - sizes[:, 1] * heights).max() < 640 * 5000 / 100


def test_a_resumed_run_at_another_size_gives_every_image_what_it_had(split):
    fit = Fit(shorter=(40, 56), longer=100)
    config = AugmentConfig(brightness=0.3)

    def per_sample(batch):
        for index, (image, target) in enumerate(zip(batch.unpadded, batch.targets, strict=True)):
            parts = [image, *(value.contiguous() for value in target.values())]
            yield batch.epoch, int(batch.positions[index]), [part.numpy().tobytes() for part in parts]

    def load(**options):
        return make(split, training=True, size=fit, augment=config, **options)

    with load() as loader:
        whole = [each for _ in range(2) for batch in loader for each in per_sample(batch)]
    with load() as loader:
        resumed = list(per_sample(next(iter(loader))))
        state = loader.state_dict()
    for rank in range(2):
        with load(batch_size=2, ranks=DataRanks(rank, 2), decode=DecodeConfig(num_threads=1)) as loader:
            loader.load_state_dict(state)
            resumed += [each for _ in range(2) for batch in loader for each in per_sample(batch)]
    assert sorted(resumed) == sorted(whole)
    assert len(whole) == 2 * NUM


@pytest.mark.filterwarnings("ignore:torch finds no GPU")
def test_batches_are_equal_in_numpy_in_page_locked_memory_and_from_a_decode_group(split):
    group = DecodeGroup(name="own-sizes", lag=64)
    with (
        make(split) as loader,
        make(split) as arrays,
        make(split) as pinned,
        make(split, decode_group=group) as one,
        make(split, decode_group=group) as two,
    ):
        for batch, *others in zip(loader, arrays.numpy(), pinned.pin(), one, two, strict=True):
            for other in others:
                assert np.array_equal(batch.images.numpy(), np.asarray(other.images))
                assert np.array_equal(batch.sizes, other.sizes)
        assert one.sharing.counts.decoded + two.sharing.counts.decoded == len(loader)


def test_a_damaged_image_is_zero_and_keeps_its_size(shared):
    samples = [outlined(seed) for seed in range(4)]
    content = samples[2]["image"]
    samples[2]["image"] = content[:60] + bytes(len(content) - 80) + content[-20:]  # ingest reads no pixels
    damaged = write(shared, "damaged", samples)
    with make(damaged, decode=DecodeConfig(on_bad="mask", num_threads=1)) as loader:
        batch = next(iter(loader))
    (index,) = batch.bad
    assert batch.keys[index] == "0002"
    assert batch.sizes[index].tolist() == list(scene(2)[0].shape[:2])
    assert not batch.images[index].any()


def test_images_whose_sizes_are_not_stored_need_a_longest_side(split):
    with pytest.raises(ConfigError, match="give size=Fit\\(longer=\\.\\.\\.\\)"):
        make(split, images=("half",))
    with make(
        split,
        images=("half",),
        size=Fit(longer=60),
        masks=(),
        boxes=None,
        keypoints=None,
        polygons=None,
        objects=None,
    ) as loader:
        for batch in loader:
            assert (batch.sizes.max(axis=1) == 60).all()


def test_masks_of_objects_are_counted_before_they_are_drawn(split, monkeypatch):
    with make(split, masks=(), boxes=None, keypoints=None) as loader:
        batches = list(loader)
        needed = [batch.objects["masks"].numel() for batch in batches]
        assert batches[0].objects["masks"].shape[1:] == batches[0].images.shape[2:]
    most = max(range(len(needed)), key=needed.__getitem__)
    config = ObjectConfig(num_keypoints=2, flip_pairs=((0, 1),))
    largest = make(split)._config.frame
    for max_bytes in (needed[most], needed[most] - 1):
        monkeypatch.setattr(Fit, "largest_frame", lambda *_: largest)  # whose images take more
        with make(split, size=Fit(max_bytes=max_bytes), masks=(), objects=config) as loader:
            if max_bytes < needed[most]:
                monkeypatch.setattr("datasvc.loaders.decode.masks.draw_masks", lambda *_: pytest.fail("drawn"))
                loader.load_state_dict({**loader.state_dict(), "position": 4 * most})
                with pytest.raises(ConfigError, match=f"{needed[most]} bytes, above max_bytes={max_bytes}"):
                    next(iter(loader))
                assert loader.state_dict()["position"] == 4 * most
            else:
                assert [batch.objects["masks"].numel() for batch in loader] == needed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": Fit(max_bytes=1000)}, "above max_bytes=1000: give a smaller batch_size, size=Fit\\(longer=9\\)"),
        ({"augment": AugmentConfig(scale=(0.5, 1.0), resize=300)}, "AugmentConfig\\(resize, scale\\) is given"),
        ({"device": "cuda:0"}, "decoded on this CPU"),
        ({"decode": DecodeConfig("cpu", servers=("http://127.0.0.1:1",))}, "leave out decode servers"),
        ({"size": 0}, "size is 0; expected at least 1"),
    ],
)
def test_wrong_arguments_are_refused(split, options, message):
    with pytest.raises(ConfigError, match=message):
        make(split, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shorter": 800}, "shorter is 800 without longer"),
        ({"longer": 0}, "longer is 0; expected pixels"),
        ({"shorter": (), "longer": 9}, "shorter is \\(\\)"),
        ({"multiple": 1.5}, "multiple is 1.5"),
        ({"multiple": None}, "multiple is None"),
        ({"longer": (640,)}, "longer is \\(640,\\)"),
        ({"shorter": [480, 800], "longer": 900}, "or a tuple of such numbers"),
        ({"max_bytes": -1}, "max_bytes is -1; expected bytes"),
    ],
)
def test_wrong_sizes_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Fit(**fields)


@pytest.mark.parametrize("fit", [Fit(), Fit(shorter=(64, 80), longer=100), Fit(longer=50, multiple=8)])
def test_settings_give_the_sizes_back(split, fit):
    with make(split, size=fit) as loader:
        assert parse_size(loader.settings["size"]) == fit
