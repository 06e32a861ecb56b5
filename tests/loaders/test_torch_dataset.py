"""Samples by number, in any process: decoding, transforms, caches, and what is refused."""

import os
import pickle
import random

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler

from datasvc.cache import Cache
from datasvc.errors import BadSampleError, ConfigError, DatasvcError
from datasvc.loaders.augment.augment import generators
from datasvc.loaders.torch import Dataset, OrderBatchSampler, ServedIndex
from datasvc.shards.format.schema import image_schema, shard_schema, stored_schema
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.deletions import delete_samples
from tests.loaders.torch_transforms import draw_everywhere
from tests.samples import jpeg
from tests.shards.written_versions import TEXT_SCHEMA, write_table


def split_of(repository, table):
    return Split("train", "made@1", repository, repository.objects.put(table.encode()).digest)


def identity(batch):
    return batch


def error_of(loader):
    """Return what iterating raises, without the frames: they would keep the loader's workers until a later test."""
    try:
        list(loader)
    except DatasvcError as error:
        return error.with_traceback(None)
    pytest.fail("nothing was raised")


def test_a_sample_is_the_splits_by_any_kind_of_integer(digits):
    split = digits["train"]
    dataset = Dataset(split, decode=None)
    assert len(dataset) == len(split)
    for number in (0, 700, len(split) - 1, -1, -len(split)):
        assert dataset[number] == split[number]
    assert dataset[np.int64(700)] == dataset[np.uint16(700)] == dataset[torch.tensor(700)] == split[700]


def test_a_batch_is_its_samples_in_the_order_in_which_they_are_asked_for(digits):
    dataset = Dataset(digits["train"], columns=("key", "label"))
    numbers = [900, 3, -1, 900, *range(0, 1400, 211)]
    assert dataset.__getitems__(numbers) == [dataset[number] for number in numbers]
    assert list(dataset[3]) == ["key", "label"]


def test_a_number_out_of_range_says_the_range(digits):
    dataset = Dataset(digits["val"])
    for number in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=rf"sample {number} is outside 0\.\.{len(dataset) - 1} of Split\(digits"):
            dataset[number]
    with pytest.raises(TypeError, match="the index of a sample is slice"):
        dataset[1:3]
    with pytest.raises(TypeError, match=r"index of a sample is 1\.5"):
        dataset[1.5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": ("key", "lable")}, r"no column 'lable'; its columns are \['key', 'image'"),
        ({"columns": "key"}, "columns is 'key'; expected names"),
        ({"columns": ()}, r"columns is \(\)"),
        ({"decode": "jpeg"}, "decode is 'jpeg'; expected 'pil', 'numpy' or None"),
        ({"on_bad": "skip"}, "on_bad is 'skip'; expected 'raise' or 'mask'"),
        ({"transform": 5}, "transform is 5; expected a callable"),
    ],
)
def test_wrong_arguments_are_refused_at_once(digits, options, said):
    with pytest.raises(ConfigError, match=said):
        Dataset(digits["val"], **options)


def test_images_are_upright_rgb_of_the_size_in_their_columns(repository):
    turned = Image.Exif()
    turned[0x0112] = 6
    encoded = [jpeg(40, 30), jpeg(40, 30, exif=turned), jpeg(20, 10, seed=3)]
    sizes = [(40, 30), (30, 40), (20, 10)]
    samples = [
        {"key": str(number), "image": blob, "width": width, "height": height}
        for number, (blob, (width, height)) in enumerate(zip(encoded, sizes, strict=True))
    ]
    split = split_of(
        repository, write_table(repository.objects, [samples], stored_schema(image_schema(labelled=False)))
    )
    for number, (width, height) in enumerate(sizes):
        image = Dataset(split)[number]["image"]
        pixels = Dataset(split, decode="numpy", columns=("image",))[number]["image"]
        assert (image.mode, image.size) == ("RGB", (width, height))
        assert (pixels.dtype, pixels.shape) == (np.uint8, (height, width, 3))
        assert np.array_equal(np.asarray(image), pixels)
        assert pixels.flags.writeable
        assert Dataset(split, decode=None)[number]["image"] == encoded[number]


@pytest.fixture
def damaged(repository):
    """Three images, of which the second is a web page."""
    samples = [
        {"key": f"{number}.jpg", "image": jpeg(24, 18, seed=number), "width": 24, "height": 18} for number in range(3)
    ]
    samples[1]["image"] = b"<html>not here</html>"
    return split_of(
        repository, write_table(repository.objects, [samples], stored_schema(image_schema(labelled=False)))
    )


def test_an_image_that_does_not_decode_is_named_or_masked(damaged, caplog):
    with pytest.raises(BadSampleError, match=r"made@1/train: sample 1, '1\.jpg': not an image.*on_bad='mask'"):
        Dataset(damaged, columns=("image",))[1]
    dataset = Dataset(damaged, columns=("image",), decode="numpy", on_bad="mask")
    assert [dataset[number]["mask"] for number in range(3)] == [True, False, True]
    assert dataset[1]["image"].shape == (18, 24, 3)
    assert not dataset[1]["image"].any()
    assert "sample 1, '1.jpg': not an image" in caplog.text


def test_a_bad_image_in_a_worker_is_named_in_the_main_process(damaged):
    loader = DataLoader(Dataset(damaged), batch_size=3, num_workers=1, collate_fn=identity)
    error = error_of(loader)
    assert isinstance(error, BadSampleError)
    assert "sample 1, '1.jpg'" in str(error)


def test_a_column_called_mask_is_not_overwritten(repository):
    schema = shard_schema([pa.field("key", pa.string(), nullable=False), pa.field("mask", pa.int64())])
    table = write_table(repository.objects, [[{"key": str(n), "mask": n} for n in range(3)]], schema)
    split = split_of(repository, table)
    assert Dataset(split)[2] == {"key": "2", "mask": 2}
    with pytest.raises(ConfigError, match="has a column 'mask' of its own"):
        Dataset(split, on_bad="mask")
    padded = DataLoader(Dataset(split), batch_sampler=OrderBatchSampler(split, batch_size=2, tail="pad"))
    with pytest.raises(ConfigError, match="has a column 'mask' of its own"):
        list(padded)


def test_deleted_samples_have_no_number_and_later_columns_are_none_before(repository):
    table = write_table(
        repository.objects,
        [[{"key": str(n), "text": f"t{n}"} for n in part] for part in ((0, 1, 2), (3, 4))],
        TEXT_SCHEMA,
    )
    less = delete_samples(repository.objects, table, {0: np.array([1]), 1: np.array([0])})
    dataset = Dataset(split_of(repository, less))
    assert [sample["key"] for sample in dataset] == ["0", "2", "4"]
    assert [dataset[number]["text"] for number in (-1, 0)] == ["t4", "t0"]


def test_it_pickles_as_an_address_and_reads_the_same_afterwards(digits):
    dataset = Dataset(digits["train"], transform=draw_everywhere, decode=None)
    dataset[5]
    content = pickle.dumps(dataset)
    assert len(content) < 1000
    index = ServedIndex(5, 1, 2, 3)
    assert torch.equal(pickle.loads(content)[index]["drawn"], dataset[index]["drawn"])


def test_a_served_index_is_an_integer_that_keeps_its_place_over_pickling():
    index = pickle.loads(pickle.dumps(ServedIndex(7, 1, 2, 3, False)))
    assert (index, index.seed, index.epoch, index.position, index.counts) == (7, 1, 2, 3, False)
    assert [10, 20, 30, 40, 50, 60, 70, 80][index] == 80


def test_a_transform_draws_by_place_and_disturbs_nobody(digits):
    dataset = Dataset(digits["train"], columns=("key",), transform=draw_everywhere)
    places = [ServedIndex(5, seed, epoch, position) for seed in (0, 9) for epoch in (0, 1) for position in (0, 1)]
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    drawn = torch.stack([dataset[place]["drawn"] for place in places])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1][1])  # noqa: NPY002
    assert random.getstate() == before[2]
    assert len(np.unique(drawn.numpy())) == drawn.numel()
    assert drawn[0, 0] == generators(0, 0, np.array([0]))[0].random()
    assert torch.equal(drawn, torch.stack([dataset[place]["drawn"] for place in places]))


@pytest.mark.slow
def test_without_an_order_a_transform_draws_as_torch_does(digits):
    dataset = Dataset(digits["train"], columns=("key",), transform=draw_everywhere)
    torch.manual_seed(3)
    first, second = dataset[5]["drawn"][0], dataset[5]["drawn"][0]
    assert first != second
    torch.manual_seed(3)
    assert dataset[5]["drawn"][0] == first
    loader = DataLoader(dataset, batch_size=7, sampler=RandomSampler(dataset), num_workers=1)
    assert len({key for batch in loader for key in batch["key"]}) == len(dataset)


def test_a_cache_may_be_small_and_is_opened_where_samples_are_read(digits, tmp_path):
    split = digits["train"]
    budget = 6 * max(split.table.bytes_per_shard)
    numbers = list(range(0, len(split), 37))
    expected = Dataset(split, columns=("key",)).__getitems__(numbers)
    with Cache(tmp_path / "cache", budget=int(budget)) as cache:
        dataset = Dataset(split, columns=("key",), cache=cache)
        assert dataset.__getitems__(numbers) == expected
        assert cache.status().resident_bytes <= budget
        forked = DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="fork")
        assert "opened before a fork" in str(error_of(forked))


def test_forked_workers_open_a_cache_that_is_given_by_its_folder(digits, tmp_path):
    split = digits["train"]
    with Cache(tmp_path / "cache", budget="1GB") as cache:
        cache.stage([split])
    dataset = Dataset(split, columns=("key",), cache=str(tmp_path / "cache"))
    loader = DataLoader(dataset, batch_size=64, num_workers=2, multiprocessing_context="fork")
    keys = [key for batch in loader for key in batch["key"]]
    assert keys == [sample["key"] for sample in Dataset(split, columns=("key",))]


def test_a_forked_child_opens_the_split_for_itself(digits):
    dataset = Dataset(digits["train"], columns=("key",))
    expected = dataset[1000]["key"]
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            said = dataset[1000]["key"] if dataset._reader.pid != os.getpid() else "the parent's reader"
            said = said if dataset._reader.split is not dataset.split else "the parent's clients"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, encoding="utf-8") as answer:
        assert answer.read() == expected
