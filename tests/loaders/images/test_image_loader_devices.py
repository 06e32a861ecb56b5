"""`ImageLoader` by every way to decode for every device, beside the CPU's own batches; on the CPU that is Pillow's.

What is compared is the same on all of them: the order, the windows, the flips and the colours are drawn before.
"""

import numpy as np
import pytest
import torch

from datasvc.errors import BadSampleError
from datasvc.loaders import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AugmentConfig,
    DataRanks,
    DecodeConfig,
    ImageLoader,
    PixelFormat,
)
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.loaders.images.test_image_loader_bad import broken_jpeg
from tests.support.devices import NEEDS_GPU, on_gpu
from tests.support.odd_images import encode, good_images, picture

# Device and decoder.
WAYS = [
    pytest.param(("cpu", "pillow"), id="pillow"),
    *(
        pytest.param(("cuda", decode), marks=NEEDS_GPU, id=f"cuda-{decode}")
        for decode in ("cpu", "gpu-window", "gpu-whole")
    ),
]
ON_THE_GPU = ("gpu-window", "gpu-whole")
# What two decoders may differ by in a pixel; the GPU's round otherwise, and resize otherwise.
LEVELS, LEVELS_OF_GPU = 2, 8
ODD = ("progressive.jpg", "grey.jpg", "cmyk.jpg", "plain.png", "rgba.png", "lossy.webp", "jpeg2000-called.jpg")
FAST = {"batch_size": 8, "training": True, "size": 32}

each_way = pytest.mark.parametrize("way", WAYS)


def write(folder, files):
    for number, (name, content) in enumerate(files.items()):
        target = folder / ("even", "odd")[number % 2]
        target.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return folder


def photos():
    return {f"{n:02d}.jpg": encode(picture(60 + n, 90 - n, seed=n), "JPEG", quality=95) for n in range(20)}


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """Splits of 20 photos each: plain ones, some with a turn or of other formats, and some that do not decode."""
    folder = tmp_path_factory.mktemp("devices")
    repository = Repository.create(str(folder / "repo"))
    good = good_images()
    odd = {name: good[name] for name in (*ODD, *(f"turned-{turn}.jpg" for turn in range(1, 9)), "turned-6.png")}
    sources = {
        "plain": photos(),
        "odd": photos() | odd,
        "spoilt": photos() | {"07.jpg": broken_jpeg(1), "12.jpg": broken_jpeg(2)},
    }
    for name, files in sources.items():
        ingest(repository, str(write(folder / name, files)), name)
    return {name: open_dataset(repository, name)["train"] for name in sources}


def make(split, way=("cpu", "cpu"), settings=None, **options):
    device, backend = way
    decode = DecodeConfig(backend, num_threads=2, **(settings or {}))
    return ImageLoader(split, **{**FAST, "device": device, "decode": decode, **options})


def take(split, way=("cpu", "cpu"), settings=None, **options):
    """Return the batches of an epoch."""
    with make(split, way, settings, **options) as loader:
        return list(loader)


def levels(batch, output="float32", layout="NCHW"):
    """Return pixels as `float64[n, size, size, 3]` in 0..255, on the CPU."""
    images = batch.images.cpu().double()
    images = images.permute(0, 2, 3, 1) if layout == "NCHW" else images
    if output == "uint8":
        return images.numpy()
    return ((images * torch.tensor(IMAGENET_STD) + torch.tensor(IMAGENET_MEAN)) * 255).numpy()


def check_alike(found, expected, way, **form):
    """Compare batches in all but the last bits of their pixels."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.images.device.type == way[0]
        assert (ours.images.dtype, ours.images.shape) == (theirs.images.dtype, theirs.images.shape)
        assert ours.positions.tolist() == theirs.positions.tolist()
        assert torch.equal(ours.labels.cpu(), theirs.labels.cpu())
        assert torch.equal(ours.mask.cpu(), theirs.mask.cpu())
        assert ours.epoch == theirs.epoch
        difference = np.abs(levels(ours, **form) - levels(theirs, **form))
        by_gpu = way[1] in ON_THE_GPU
        assert difference.mean() < (1.5 if by_gpu else 0.6)
        assert np.quantile(difference, 0.99) <= (LEVELS_OF_GPU if by_gpu else LEVELS)


def check_equal(found, expected, way):
    """Compare what is decoded twice in the same way: bit for bit, unless a GPU does it, which does not promise it."""
    check_alike(found, expected, way)
    if way[1] not in ON_THE_GPU:
        assert all(torch.equal(a.images, b.images) for a, b in zip(found, expected, strict=True))


@each_way
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("output", ["uint8", "float32", "float16", "bfloat16"])
def test_every_type_and_layout_holds_what_the_cpu_gives(splits, way, output, layout):
    form = {"output": output, "layout": layout}
    pixels = PixelFormat(**form)
    check_alike(take(splits["plain"], way, pixels=pixels), take(splits["plain"], pixels=pixels), way, **form)


@each_way
def test_evaluation_takes_the_same_centres_and_pads_the_same_end(splits, way):
    options = {"training": False, "batch_size": 12}
    found = take(splits["plain"], way, **options)
    check_alike(found, take(splits["plain"], **options), way)
    assert int(found[-1].mask.sum()) == 8


@each_way
def test_turned_images_and_other_formats_come_as_the_cpu_shows_them(splits, way):
    for training in (True, False):
        options = {"training": training, "batch_size": 12, "tail": "short", "columns": ("key",)}
        found, expected = take(splits["odd"], way, **options), take(splits["odd"], **options)
        check_alike(found, expected, way)
        assert [batch.columns["key"] for batch in found] == [batch.columns["key"] for batch in expected]
        assert not any(batch.bad for batch in found)


@each_way
def test_colours_are_changed_by_the_same_draws(splits, way):
    jitter = AugmentConfig(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.05)
    found, plain = take(splits["plain"], way, augment=jitter), take(splits["plain"], way)
    check_alike(found, take(splits["plain"], augment=jitter), way)
    assert all((levels(a) - levels(b)).std() > 5 for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("way", [way for way in WAYS if way.values[0][1] not in ON_THE_GPU])
def test_a_transform_in_python_changes_the_images_before_they_are_uploaded(splits, way):
    def negative(image, generator):
        return 255 - image

    found, plain = (
        take(splits["plain"], way, **how, pixels="uint8")
        for how in ({"augment": AugmentConfig(transform=negative)}, {})
    )
    assert all(torch.equal(a.images, 255 - b.images) for a, b in zip(found, plain, strict=True))


@each_way
def test_bad_images_are_masked_zero_and_named_and_spoil_nothing_beside_them(splits, way):
    options = {"tail": "short", "settings": {"on_bad": "mask"}}
    with make(splits["spoilt"], way, **options) as loader:
        found = list(loader)
        assert loader.num_bad == 2
    expected = take(splits["spoilt"], **options)
    check_alike(found, expected, way)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.bad.keys() == theirs.bad.keys()
        assert not any(ours.images[index].any() or ours.mask[index] for index in ours.bad)


@each_way
def test_a_bad_image_is_raised_before_its_batch_and_behind_it_the_run_goes_on(splits, way):
    served = []
    with make(splits["spoilt"], way, batch_size=1, tail="short") as loader:
        for _ in range(20):
            try:
                served += next(iter(loader)).positions.tolist()
            except BadSampleError:
                state = loader.state_dict()
                loader.load_state_dict({**state, "position": state["position"] + 1})
    assert len(set(served)) == len(served) == 18


@each_way
def test_labels_mask_and_numeric_columns_lie_beside_the_images_and_lists_stay_lists(splits, way):
    for batch in take(splits["plain"], way, columns=("key", "width")):
        columns = (batch.labels, batch.mask, batch.columns["width"])
        assert {each.device for each in columns} == {batch.images.device}
        assert batch.labels.dtype == torch.int64
        assert isinstance(batch.columns["key"], list)
        assert isinstance(batch.positions, np.ndarray)
        widths = [60 + int(key.partition("/")[2].partition(".")[0]) for key in batch.columns["key"]]
        assert batch.columns["width"].tolist() == widths


@each_way
def test_a_rank_without_samples_gets_an_empty_batch_on_its_device(splits, way):
    place = {"ranks": DataRanks(0, 3)}
    batches = take(splits["plain"], way, batch_size=6, training=False, tail="short", **place)
    assert [len(batch.images) for batch in batches] == [6, 0]
    assert (batches[1].images.shape[1:], batches[1].images.device.type) == ((3, 32, 32), way[0])
    assert batches[1].labels.device == batches[1].mask.device == batches[1].images.device


@each_way
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_state_of_the_cpu_is_continued_with_exactly_the_samples_that_are_left(splits, way, taken):
    whole = take(splits["plain"], tail="short")
    for saver, goes_on in ((("cpu", "cpu"), way), (way, ("cpu", "cpu"))):
        with make(splits["plain"], saver, tail="short") as loader:
            for _ in range(taken):
                next(iter(loader))
            state = loader.state_dict()
        with make(splits["plain"], goes_on, tail="short") as loader:
            loader.load_state_dict(state)
            rest = list(loader)
        assert [batch.positions.tolist() for batch in rest] == [b.positions.tolist() for b in whole[taken:]]
        if taken < len(whole):
            check_alike(rest, whole[taken:], goes_on)


@each_way
def test_without_prefetch_and_with_more_of_it_batches_are_equal_on_the_cpu_bit_for_bit(splits, way):
    first, *others = (take(splits["plain"], way, {"prefetch": prefetch}) for prefetch in (2, 0, 4))
    for batches in others:
        check_equal(batches, first, way)


@each_way
def test_a_batch_that_is_kept_is_never_written_again(splits, way):
    copies, kept = [], []
    with make(splits["plain"], way) as loader:
        for _ in range(4):  # epochs: more batches than any ring holds
            for batch in loader:
                copies.append([each.cpu().clone() for each in (batch.images, batch.labels, batch.mask)])
                kept.append(batch)
    for batch, copied in zip(kept, copies, strict=True):
        for now, then in zip((batch.images, batch.labels, batch.mask), copied, strict=True):
            assert torch.equal(now.cpu(), then)


def check_sums(found, expected, way):
    """Compare means of pixels and sums of labels: a GPU that decodes does not promise equal bits."""
    assert torch.allclose(found, expected, rtol=0, atol=0.5 if way[1] in ON_THE_GPU else 0)


@each_way
def test_a_batch_that_is_dropped_while_its_device_is_behind_is_still_read_right(splits, way):
    def sums(lag):
        found = []
        with make(splits["plain"], way, pixels="uint8") as loader:
            for _ in range(3):
                for batch in loader:
                    if lag and way[0] == "cuda":
                        torch.cuda._sleep(100_000_000)  # what reads the batch is queued behind this
                    found.append(torch.stack([batch.images.double().mean(), batch.labels.double().sum()]))
                    del batch
        return torch.stack(found).cpu()

    check_sums(sums(lag=True), sums(lag=False), way)


@on_gpu
def test_cuda_is_the_current_device_and_a_number_is_that_one(splits):
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        (batch, *_) = take(splits["plain"], ("cuda", "cpu"))
        assert batch.images.device == torch.device("cuda", last)
    (batch, *_) = take(splits["plain"], ("cuda:0", "cpu"))
    assert batch.images.device == torch.device("cuda", 0)


@on_gpu
def test_auto_decodes_by_one_of_those_that_work_and_a_resumed_run_by_the_same(splits):
    with make(splits["plain"], ("cuda", "auto")) as loader:
        first = next(iter(loader))
        chosen, state = loader.decode, loader.state_dict()
        rest = list(loader)
    assert chosen in ("cpu", *ON_THE_GPU)
    with make(splits["plain"], ("cuda", "auto")) as loader:
        loader.load_state_dict(state)
        again = list(loader)
        assert loader.decode == chosen
    assert first.images.is_cuda
    check_equal(again, rest, ("cuda", chosen))


@on_gpu
@pytest.mark.parametrize("decode", ["cpu", *ON_THE_GPU])
def test_a_batch_is_ready_for_a_stream_that_was_current_when_it_was_taken(splits, decode):
    way = ("cuda", decode)

    def means():
        return torch.stack([batch.images.double().mean() for batch in take(splits["plain"], way, pixels="uint8")])

    expected = means().cpu()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = means()
    stream.synchronize()
    check_sums(found.cpu(), expected, way)


@on_gpu
def test_pinned_batches_are_uploaded_without_a_wait_and_are_not_written_before_that_is_done(splits):
    with make(splits["plain"], pixels="uint8") as loader:
        expected = [batch.images for _ in range(3) for batch in loader]
    uploaded = []
    with make(splits["plain"], pixels="uint8") as loader:
        for _ in range(3):
            for batch in loader.pin():
                assert batch.images.is_pinned()
                assert batch.labels.is_pinned()
                torch.cuda._sleep(100_000_000)  # the copy below is queued behind this
                uploaded.append(batch.images.to("cuda", non_blocking=True))
                del batch
    assert all(torch.equal(a.cpu(), b) for a, b in zip(uploaded, expected, strict=True))
