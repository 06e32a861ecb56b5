"""ImageLoader with real shards and DALI on the CPU."""

import dataclasses
import gc
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from datasvc.cache import Cache, process_handle
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.prefetch.window_budget import window_bytes
from datasvc.errors import (
    BadSampleError,
    CacheFullError,
    ConfigError,
    CorruptDataError,
    StateMismatchError,
    UnavailableError,
)
from datasvc.loaders import DataRanks, DecodeConfig, ImageLoader
from datasvc.loaders.augment.augment import AugmentConfig
from datasvc.loaders.decode.backend import BackendConfig
from datasvc.loaders.decode.gpu.dali import decoder_arguments
from datasvc.loaders.decode.pixels import PixelFormat
from datasvc.order import OrderConfig
from datasvc.shards import ingest, open_dataset
from tests.samples import jpeg

FAST = {"size": 32, "decode": DecodeConfig(num_threads=1)}


def make(split, batch_size=8, **options):
    return ImageLoader(split, **{"batch_size": batch_size, "training": True, **FAST, **options})


def take(loader, count):
    """Return `count` batches, over epochs."""
    found = []
    while len(found) < count:
        for batch in loader:
            found.append(batch)
            if len(found) == count:
                break
    return found


def same(first, second):
    return (
        torch.equal(first.images, second.images)
        and torch.equal(first.labels, second.labels)
        and np.array_equal(first.positions, second.positions)
        and first.epoch == second.epoch
    )


def test_a_batch_unpacks_to_images_and_labels(digits):
    with make(digits["train"], 16) as loader:
        images, labels = next(iter(loader))
    assert (images.shape, images.dtype) == ((16, 3, 32, 32), torch.float32)
    assert (labels.shape, labels.dtype) == ((16,), torch.int64)


def test_an_epoch_serves_each_sample_once_with_its_own_label(digits):
    split = digits["val"]
    served = []
    with make(split, 16, tail="short") as loader:
        for batch in loader:
            assert batch.mask.all()
            served += zip(batch.positions.tolist(), batch.labels.tolist(), strict=True)
    assert sorted(position for position, _ in served) == list(range(360))
    counts = np.bincount([label for _, label in served])
    assert counts.tolist() == np.bincount([sample["label"] for sample in split]).tolist()


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7])
def test_resumed_batches_equal_those_of_an_uninterrupted_run_bit_for_bit(digits, taken):
    """An epoch of `val` has 5 steps of 64: states inside, at the end of, and after an epoch."""
    with make(digits["val"], 64) as loader:
        whole = take(loader, 12)
    with make(digits["val"], 64) as loader:
        take(loader, taken)
        state = json.loads(json.dumps(loader.state_dict()))
    with make(digits["val"], 64, decode=DecodeConfig(num_threads=2, prefetch=3)) as loader:
        take(loader, 2)  # prefetched and then not wanted
        loader.load_state_dict(state)
        rest = take(loader, 12 - taken)
    assert all(same(first, second) for first, second in zip(whole[taken:], rest, strict=True))


def test_a_state_taken_in_the_last_batch_of_an_epoch_goes_on_with_the_next_epoch(digits):
    with make(digits["val"], 64) as loader:
        for _ in loader:
            state = loader.state_dict()
        assert state["position"] == 320
        assert loader.state_dict() == {**state, "epoch": 1, "position": 0}
    with make(digits["val"], 64) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert (loader.epoch, loader.progress, loader.steps_left) == (1, 1.0, 5)
        assert [batch.epoch for batch in loader] == [1] * 5
        assert loader.epoch == 2


def test_the_epoch_of_a_loop_is_its_own_until_it_is_left(digits):
    with make(digits["val"], 64) as loader:
        for number, _ in enumerate(loader, 1):
            assert (loader.epoch, loader.steps_left) == (0, 5 - number)
            if number == 5:
                break
        assert (loader.epoch, loader.steps_left) == (1, 5)
        assert [batch.epoch for batch in loader] == [1] * 5
        suspended = iter(loader)
        for _ in range(5):
            next(suspended)
        assert (loader.epoch, loader.steps_left) == (2, 0)
        following = iter(loader)
        assert next(following).epoch == 3
        del suspended
        for _ in range(4):
            next(following)
        assert (loader.epoch, loader.steps_left) == (3, 0)


def test_all_ranks_of_another_batch_size_find_that_no_step_is_left(digits):
    """An epoch of 360 samples has 20 left: a step of 16, but none of 2 ranks of 16."""
    state = None
    for rank in range(2):
        with make(digits["val"], 16, ranks=DataRanks(rank, 2)) as loader:
            state = {**loader.state_dict(), "position": 340}
            loader.load_state_dict(state)
            assert (loader.epoch, next(iter(loader)).epoch) == (1, 1)
    with make(digits["val"], 16) as loader:
        loader.load_state_dict(state)
        assert (loader.epoch, [batch.epoch for batch in loader]) == (0, [0])


def test_resized_from_3_to_2_to_4_ranks_each_sample_of_the_epoch_is_served_once(digits):
    split, state, positions = digits["val"], None, []
    for world_size, batch_size, steps in ((3, 7, 4), (2, 11, 3), (4, 5, 1000)):
        states = []
        for rank in range(world_size):
            with make(split, batch_size, tail="pad", ranks=DataRanks(rank, world_size)) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for number, batch in enumerate(loader, 1):
                    positions += batch.positions[batch.mask.numpy()].tolist()
                    if number == steps:
                        break
                states.append(loader.state_dict())
        assert all(each == states[0] for each in states)
        state = states[0]
    assert sorted(positions) == list(range(360))


def test_ranks_share_a_global_batch_that_does_not_depend_on_their_number(digits):
    def first_batch(world_size):
        parts = []
        for rank in range(world_size):
            with make(digits["train"], 24 // world_size, ranks=DataRanks(rank, world_size)) as loader:
                parts.append(next(iter(loader)))
        return torch.cat([part.images for part in parts])

    assert torch.equal(first_batch(1), first_batch(2))
    assert torch.equal(first_batch(1), first_batch(3))


def test_tails_are_dropped_short_or_padded_as_asked(digits):
    lengths = {}
    for tail in ("drop", "short", "pad"):
        with make(digits["val"], 100, tail=tail) as loader:
            lengths[tail] = [(len(batch.images), int(batch.mask.sum())) for batch in loader]
            assert len(loader) == len(lengths[tail])
    assert lengths["drop"] == [(100, 100)] * 3
    assert lengths["short"] == [(100, 100)] * 3 + [(60, 60)]
    assert lengths["pad"] == [(100, 100)] * 3 + [(100, 60)]


def test_a_rank_with_nothing_of_a_short_tail_gets_an_empty_batch(repository, tmp_path):
    for number in range(5):
        (tmp_path / "flat").mkdir(exist_ok=True)
        (tmp_path / "flat" / f"{number}.jpg").write_bytes(jpeg(seed=number))
    ingest(repository, str(tmp_path / "flat"), "flat")
    split = open_dataset(repository, "flat")["train"]
    with make(split, 1, tail="short", ranks=DataRanks(0, 4)) as loader:
        assert [len(batch.images) for batch in loader] == [1, 0]
        assert next(iter(loader)).labels is None


def test_batches_that_are_kept_are_not_overwritten(digits):
    with make(digits["train"], 8) as loader:
        kept = take(loader, 12)
        copies = [batch.images.clone() for batch in kept]
        take(loader, 12)
    assert all(torch.equal(batch.images, copy) for batch, copy in zip(kept, copies, strict=True))


def reference(content, box, size, mean, std):
    """Pillow's picture of a window, normalised: `float32[3, size, size]`."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    scaled = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box), np.float32) / 255
    return ((scaled - mean) / std).transpose(2, 0, 1)


@pytest.mark.parametrize(("evaluation", "most"), [("torchvision", 1), ("window", 4)])
def test_pixels_are_those_of_resize_and_centre_crop(repository, tmp_path, evaluation, most):
    source = tmp_path / "photos" / "a"
    source.mkdir(parents=True)
    content = jpeg(160, 120, seed=4, quality=95)
    (source / "x.jpg").write_bytes(content)
    ingest(repository, str(tmp_path / "photos"), "photos")
    split = open_dataset(repository, "photos")["train"]
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    with ImageLoader(
        split,
        batch_size=1,
        training=False,
        size=56,
        pixels=PixelFormat(mean=mean, std=std),
        augment=AugmentConfig(resize=64, evaluation=evaluation),
    ) as loader:
        images, _ = next(iter(loader))
    # The shorter side 120 scaled to 64, the centre 56 of it kept: 105 of the image's pixels. The longer side is 85
    # pixels then, and the crop starts at pixel 14.
    expected = reference(content, (14 * 160 / 85, 7.5, 70 * 160 / 85, 112.5), 56, mean, std)
    difference = np.abs(images[0].numpy() - expected) * np.array(std)[:, None, None] * 255
    # Levels of 255, with the rounding of floats. The older window starts on whole pixels.
    assert (difference.max() if evaluation == "torchvision" else difference.mean()) < most + 0.01


def test_an_image_turned_by_exif_is_cropped_in_its_upright_form(repository, tmp_path):
    source = tmp_path / "photos" / "a"
    source.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:, :20] = (255, 0, 0)  # left edge: the top edge once upright
    pixels[:, 60:] = (0, 0, 255)
    Image.fromarray(pixels).save(source / "x.jpg", exif=exif, quality=95)
    ingest(repository, str(tmp_path / "photos"), "photos")
    split = open_dataset(repository, "photos")["train"]
    assert (split[0]["width"], split[0]["height"]) == (40, 80)
    plain = {"pixels": PixelFormat(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))}
    whole = AugmentConfig(scale=(1.0, 1.0), ratio=(0.5, 0.5), flip=0)
    with ImageLoader(split, batch_size=1, training=True, size=40, augment=whole, **plain) as loader:
        images, _ = next(iter(loader))
    red, _, blue = images[0]
    assert (red[:8].mean() > 0.9, red[-8:].mean() < 0.1) == (True, True)
    assert (blue[-8:].mean() > 0.9, blue[:8].mean() < 0.1) == (True, True)


def test_grey_cmyk_and_png_images_become_three_channels(repository, tmp_path):
    source = tmp_path / "photos" / "a"
    source.mkdir(parents=True)
    for mode, extension in (("L", "jpg"), ("RGB", "png"), ("P", "png"), ("CMYK", "jpg")):
        Image.new(mode, (40, 40)).save(source / f"{mode}.{extension}")
    ingest(repository, str(tmp_path / "photos"), "photos")
    with make(open_dataset(repository, "photos")["train"], 4) as loader:
        assert next(iter(loader)).images.shape == (4, 3, 32, 32)


def test_a_sample_that_does_not_decode_is_named_and_the_loader_goes_on_elsewhere(repository, folder):
    photo = bytearray(jpeg(seed=1))
    table = photo.index(b"\xff\xc4")
    photo[table + 5 : table + 21] = b"\xff" * 16  # a Huffman table that cannot be; header and end look right
    (folder / "train" / "b" / "bad.jpg").write_bytes(photo)
    ingest(repository, str(folder), "pets")
    split = open_dataset(repository, "pets")["train"]
    with make(split, 3, shuffle=None, tail="short") as loader:
        with pytest.raises(BadSampleError, match=r"1 of 3 samples .* pets@1/train: 'b/bad\.jpg' \(row \d+ of shard"):
            take(loader, 7)
        failed_at = loader.state_dict()["position"]
        loader.load_state_dict({**loader.state_dict(), "position": failed_at + 3})
        take(loader, 3)


def test_a_cache_is_filled_by_the_loader_and_released_when_it_closes(digits, tmp_path):
    cache = Cache(tmp_path / "cache", budget="10MB")
    with make(digits["train"], 64, cache=cache) as loader:
        for _ in loader:
            pass
        assert cache.status().resident_bytes == footprint(digits["train"].table.bytes_per_shard).sum()
        assert cache.status().held_bytes > 0
    assert cache.status().held_bytes == 0


@pytest.mark.slow
def test_a_windowed_order_streams_through_a_cache_smaller_than_the_data(digits, tmp_path):
    table = digits["train"].table
    order = OrderConfig(shuffle="windowed", lanes=1, block=64)
    budget = int(table.size_bytes * 0.8)
    cache = Cache(tmp_path / "cache", budget=budget)
    with make(digits["train"], 32, cache=cache, tail="short", order=order, decode=DecodeConfig(prefetch=1)) as loader:
        for _ in range(2):
            positions = []
            for batch in loader:
                positions += batch.positions.tolist()
                assert cache.status().resident_bytes <= budget
            assert sorted(positions) == list(range(1437))


def test_a_budget_below_the_window_is_refused_at_the_start_with_the_number(digits, tmp_path):
    needed = int(footprint(digits["train"].table.bytes_per_shard).sum())
    cache = Cache(tmp_path / "cache", budget=needed - 1)
    with pytest.raises(CacheFullError, match=f"needs {needed} bytes .*, and {needed - 1} are available"):
        make(digits["train"], cache=cache)


def test_what_is_pinned_of_other_data_leaves_no_room_and_of_this_data_does_not_count(digits, tmp_path):
    sizes = [int(footprint(digits[name].table.bytes_per_shard).sum()) for name in ("train", "val")]
    with Cache(tmp_path / "cache", budget=sum(sizes)) as cache:
        cache.pin("val", [digits["val"]])
        make(digits["train"], cache=cache).close()
    with Cache(tmp_path / "cache", budget=sum(sizes) - 1) as cache:
        make(digits["val"], cache=cache).close()
        with pytest.raises(CacheFullError, match=f"{sizes[0] - 1} are available beside pinned objects"):
            make(digits["train"], cache=cache)


def test_a_corrupt_origin_reaches_the_training_loop_as_an_error(repository, folder, tmp_path):
    ingest(repository, str(folder), "pets")
    split = open_dataset(repository, "pets")["train"]
    path = repository.objects.local_path(split.table.shard(0).digest)
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    for cache in (None, Cache(tmp_path / "cache", budget="1MB")):
        with make(split, 4, cache=cache) as loader, pytest.raises(CorruptDataError):
            next(iter(loader))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"training": False, "augment": AugmentConfig(resize=0)}, "resize is 0, below size 32"),
        ({"size": 0}, "size is 0"),
        ({"batch_size": 2000}, "gives no full batch of 2000"),
        ({"ranks": 2}, r"ranks is 2; expected DataRanks\(rank, world_size\) or a device mesh"),
        ({"tail": "wrap"}, "tail is 'wrap'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cpu:1"}, "device is 'cpu:1'"),
        ({"training": False, "augment": AugmentConfig(resize=16)}, "resize is 16, below size 32"),
        ({"shuffle": "windowed", "order": OrderConfig()}, "give them in the OrderConfig only"),
        ({"shuffle": "random"}, "shuffle is 'random'"),
        ({"seed": 1, "order": OrderConfig()}, "seed=1 and shuffle='auto' are given together with order="),
        ({"shuffle": None, "order": OrderConfig()}, "give them in the OrderConfig only"),
    ],
)
def test_arguments_out_of_range_are_refused(digits, options, message):
    with pytest.raises(ConfigError, match=message):
        make(digits["train"], **options)


def test_the_cpu_may_have_the_number_that_frameworks_give_it(digits):
    with make(digits["train"], device="cpu:0") as loader:
        assert next(iter(loader)).images.device.type == "cpu"


def test_a_state_of_another_version_or_order_is_refused(digits):
    with make(digits["train"]) as loader, make(digits["val"]) as other, make(digits["train"], seed=9) as seeded:
        for state in (other.state_dict(), seeded.state_dict()):
            with pytest.raises(StateMismatchError):
                loader.load_state_dict(state)


def test_without_a_gpu_no_mixed_operator_is_in_the_graph_and_with_one_memory_is_hinted():
    pixels = PixelFormat()
    config = BackendConfig(8, 32, pixels, num_threads=1, prefetch=2, max_width=500, max_height=375)
    assert decoder_arguments(config) == {"device": "cpu"}
    on_gpu = dataclasses.replace(config, device_id=1)
    assert decoder_arguments(on_gpu) == {
        "device": "mixed", "preallocate_width_hint": 500, "preallocate_height_hint": 375,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gpu_and_cpu_decode_agree(digits):
    with make(digits["val"], 32) as on_cpu, make(digits["val"], 32, device="cuda") as on_gpu:
        for first, second in zip(on_cpu, on_gpu, strict=True):
            assert second.images.is_cuda
            assert (first.images - second.images.cpu()).abs().mean() < 1 / 255 / 0.225


class Interrupting:
    """A decoder that is interrupted once, right after a batch was taken."""

    def __init__(self, decoder, after):
        self._decoder, self._left = decoder, after

    def feed(self, *arguments):
        self._decoder.feed(*arguments)

    def take(self):
        output = self._decoder.take()
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return output

    def close(self):
        self._decoder.close()


@pytest.mark.parametrize("tail", ["short", "pad"])
def test_after_ctrl_c_anywhere_the_loader_goes_on_exactly(digits, tail):
    with make(digits["val"], 64, tail=tail) as loader:
        whole = take(loader, 8)
    with make(digits["val"], 64, tail=tail) as loader:
        found = take(loader, 2)
        loader._decoder = Interrupting(loader._decoder, after=1)
        with pytest.raises(KeyboardInterrupt):
            take(loader, 1)
        found += take(loader, 6)
    assert all(same(first, second) for first, second in zip(whole, found, strict=True))


def test_after_an_error_of_the_store_the_same_loader_goes_on(digits, monkeypatch):
    with make(digits["train"], 64) as loader:
        whole = take(loader, 4)
    with make(digits["train"], 64) as loader:
        found = take(loader, 1)

        def unavailable(_info):
            raise UnavailableError("503")

        loader._batches.close()
        monkeypatch.setattr(loader.split.origin, "open_shard", unavailable)
        with pytest.raises(UnavailableError):
            take(loader, 3)
        monkeypatch.undo()
        found += take(loader, 3)
    assert all(same(first, second) for first, second in zip(whole, found, strict=True))


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_short_and_empty_batches_work_at_any_prefetch(digits, prefetch):
    """9 positions left for 2 ranks of 4: the last step has one sample, for rank 1."""
    for rank, sizes in ((0, [4, 0]), (1, [4, 1])):
        with make(
            digits["val"], 4, tail="short", ranks=DataRanks(rank, 2), decode=DecodeConfig(prefetch=prefetch)
        ) as loader:
            loader.load_state_dict({**loader.state_dict(), "position": 351})
            assert [len(batch.images) for batch in loader] == sizes
            assert len(next(iter(loader)).labels) == 4


def test_progress_counts_epochs_with_their_share(digits):
    with make(digits["val"], 90) as loader:
        assert loader.progress == 0
        take(loader, 1)
        assert loader.progress == 0.25
        take(loader, 4)
        assert loader.progress == 1.25


def test_a_batch_whose_shards_cannot_be_released_is_not_skipped(digits, tmp_path, monkeypatch):
    """The release writes to the cache's catalogue, which may fail after the batch was decoded."""
    with make(digits["val"], 64) as loader:
        whole = take(loader, 6)
    with make(digits["val"], 64) as loader:
        found = take(loader, 2)

        def failing(_batch):
            raise UnavailableError("catalogue")

        monkeypatch.setattr(loader._batches, "retire", failing)
        with pytest.raises(UnavailableError):
            take(loader, 1)
        monkeypatch.undo()
        found += take(loader, 4)
    assert all(same(first, second) for first, second in zip(whole, found, strict=True))


def test_an_interrupt_between_a_batch_and_the_cursor_repeats_the_batch(digits):
    with make(digits["val"], 64) as loader:
        whole = take(loader, 4)
    with make(digits["val"], 64) as loader:
        found = take(loader, 2)
        loader._next()  # handed to nobody
        found += take(loader, 2)
    assert all(same(first, second) for first, second in zip(whole, found, strict=True))


def test_the_window_counts_prefetched_batches_of_all_ranks_and_the_next_epochs_first_shards(digits, tmp_path):
    table = digits["train"].table
    order = OrderConfig(shuffle="windowed", lanes=1, block=60)
    run, skipped = 30 * 2 * (3 + 2), 30 * 2 - 1
    window = window_bytes(table.samples_per_shard, table.bytes_per_shard, order, run, skipped=skipped)
    assert window < table.size_bytes
    cache = Cache(tmp_path / "cache", budget=window - 1)
    with pytest.raises(CacheFullError, match=f"needs {window} bytes"):
        make(digits["train"], 30, cache=cache, order=order, ranks=DataRanks(0, 2), decode=DecodeConfig(prefetch=3))


def test_evaluation_serves_every_sample_in_table_order_by_default(digits):
    split, labels = digits["val"], []
    with make(split, 100, training=False) as loader:
        for batch in loader:
            labels += batch.labels[batch.mask].tolist()
    assert labels == [sample["label"] for sample in split]


def test_evaluation_keeps_224_of_256_parts_of_the_shorter_side_by_default(digits):
    shape = {"training": False, "size": 56}
    with (
        make(digits["val"], 8, **shape) as first,
        make(digits["val"], 8, **shape, augment=AugmentConfig(resize=64)) as second,
    ):
        assert same(next(iter(first)), next(iter(second)))


def test_windows_of_a_sample_differ_from_epoch_to_epoch_and_seed_to_seed(digits):
    def images(seed, epoch):
        with make(digits["val"], 16, shuffle=None, seed=seed) as loader:
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
            return next(iter(loader)).images

    first = images(0, 0)
    assert torch.equal(images(0, 0), first)
    assert not torch.equal(images(0, 1), first)
    assert not torch.equal(images(1, 0), first)


def test_fewer_samples_than_ranks_are_refused(digits):
    with pytest.raises(ConfigError, match="fewer samples than there are ranks: 361"):
        make(digits["val"], 1, tail="pad", ranks=DataRanks(360, 361))


def test_a_flip_mirrors_left_and_right(digits):
    def images(flip):
        whole = AugmentConfig(scale=(1, 1), ratio=(1, 1), flip=flip)
        with make(digits["val"], 8, shuffle=None, size=64, augment=whole) as loader:
            return next(iter(loader)).images

    assert torch.allclose(images(1.0), images(0.0).flip(-1), atol=1e-3)
    assert not torch.allclose(images(1.0), images(0.0), atol=1e-3)


def test_a_large_image_is_smoothed_and_not_merely_sampled(repository, tmp_path):
    (tmp_path / "photos").mkdir()
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, 3::8] = stripes[:, 4::8] = 255  # a quarter is white: the middle of each output pixel
    Image.fromarray(stripes).save(tmp_path / "photos" / "x.png")
    ingest(repository, str(tmp_path / "photos"), "photos")
    split = open_dataset(repository, "photos")["train"]
    plain = {"pixels": PixelFormat(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))}
    with make(split, 1, training=False, **plain, augment=AugmentConfig(resize=32)) as loader:
        images = next(iter(loader)).images
    assert images.max() < 0.6


@pytest.mark.slow
def test_a_loader_reads_through_a_cache_given_by_its_folder_and_leaves_nothing_open(digits, tmp_path):
    folder = tmp_path / "cache"
    Cache(folder, budget="64MB").close()
    with make(digits["val"], 64) as loader:
        expected = take(loader, 3)
    for cache in (folder, str(folder)):
        loader = make(digits["val"], 64, cache=cache)
        with loader:
            assert all(same(first, second) for first, second in zip(expected, take(loader, 3), strict=True))
        del loader
        gc.collect()
        assert folder.resolve() not in process_handle._folders
    with Cache(folder) as cache:
        assert cache.counters()["hits"] > 0


def test_the_folder_of_a_cache_without_a_budget_is_refused_with_what_to_do(digits, tmp_path):
    with pytest.raises(ConfigError, match=r"has no budget yet; set one: Cache\('.*/cache', budget='50GB'\)"):
        make(digits["val"], 64, cache=str(tmp_path / "cache"))
