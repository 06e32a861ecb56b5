"""What users of other tools met with batches of images of a similar aspect, or of texts of a similar length."""

from collections import Counter

import numpy as np
import pytest

from datasvc.loaders import DataRanks, Fit, ImageLoader
from datasvc.shards import ingest, open_dataset
from tests.reports.test_boxes_and_masks import png

GROUP = 4


def pictures(repository, shapes, name="pictures"):
    """Return a split of pictures of these widths and heights, grouped by aspect."""
    images = [png(np.full((height, width, 3), 9, np.uint8)) for width, height in shapes]
    ingest(repository, [{"key": str(number), "image": image} for number, image in enumerate(images)], name)
    return open_dataset(repository, name)["train"].grouped_by_aspect(GROUP)


def load(view, *, rank=0, world_size=1, batch_size=GROUP, training=True, **options):
    ranks = DataRanks(rank, world_size)
    return ImageLoader(view, batch_size=batch_size, training=training, size=None, ranks=ranks, seed=1, **options)


def keys_of(loader):
    with loader:
        return [
            [key for key, is_sample in zip(batch.keys, batch.mask.tolist(), strict=True) if is_sample]
            for batch in loader
        ]


@pytest.mark.parametrize("num", [3, 5, 42])
def test_the_length_of_an_epoch_is_its_number_of_batches_and_no_sample_is_missing(repository, num):
    """pytorch/vision#9127: the length left out the last batch; NovelAI/novelai-aspect-ratio-bucketing#5: a batch of
    the images left over had another size."""
    view = pictures(repository, [(10 + number % 9, 10 + number % 7) for number in range(num)])
    for tail in ("short", "drop", "pad"):
        if tail == "drop" and num < GROUP:
            continue
        loader = load(view, tail=tail)
        batches = keys_of(loader)
        assert len(batches) == len(loader) == (num // GROUP if tail == "drop" else -(-num // GROUP))
        assert {len(batch) for batch in batches[:-1]} <= {GROUP}
        served = [key for batch in batches for key in batch]
        assert len(served) == len(set(served)) == (num - num % GROUP if tail == "drop" else num)


def test_images_of_one_aspect_and_of_an_aspect_with_few_images_are_served(repository):
    """facebookresearch/detectron2#58: images of one aspect failed; bmaltais/kohya_ss#3457: those of an aspect with
    fewer images than a batch were left out."""
    shapes = [(20, 10)] * 21 + [(10, 20)] * 3
    for name, chosen in (("one", shapes[:21]), ("few", shapes)):
        view, seen = pictures(repository, chosen, name), Counter()
        loader = load(view, tail="short")
        for _ in range(3):
            seen.update(key for batch in loader for key in batch.keys)
        loader.close()
        assert seen == {str(number): 3 for number in range(len(chosen))}


def test_evaluations_have_the_same_batches_each_time(repository):
    """huggingface/transformers#48025: each evaluation had other batches, and another loss of the same weights."""
    view = pictures(repository, [(10 + number % 9, 10 + number % 7) for number in range(30)])
    assert keys_of(load(view, training=False)) == keys_of(load(view, training=False))
    loader = load(view, training=False)
    assert [batch.keys for batch in loader] == [batch.keys for batch in loader]
    loader.close()


def test_the_ranks_of_a_step_have_one_aspect_and_together_each_sample_once(repository):
    """huggingface/transformers#9574: the parts of the ranks were no permutation together;
    NovelAI/novelai-aspect-ratio-bucketing#3: each rank had another shape, and the others waited for the largest."""
    shapes = [(40, 20), (20, 40)] * 60
    view = pictures(repository, shapes)
    whole = keys_of(load(view))
    mixed = sum(len({int(key) % 2 for key in batch}) > 1 for batch in whole)
    assert mixed <= 1  # of 30: half of the images are tall, so a block has one batch of both at most
    for world_size in (2, 4):
        size = GROUP // world_size
        ranks = [keys_of(load(view, rank=rank, world_size=world_size, batch_size=size)) for rank in range(world_size)]
        assert [[key for part in step for key in part] for step in zip(*ranks, strict=True)] == whole


def test_batches_are_in_another_order_than_their_aspects(repository):
    """modelscope/ms-swift#10111: the batches of a sorted block came from long to short, in cycles."""
    view = pictures(repository, [(10 + number, 80) for number in range(128)])
    widths = [10 + int(batch[0]) for batch in keys_of(load(view))]
    assert abs(np.corrcoef(widths[:-1], widths[1:])[0, 1]) < 0.5


def test_a_run_that_continues_has_the_batches_of_one_that_was_not_interrupted(repository):
    """Lightning-AI/pytorch-lightning#21312: after a resume a sampler of groups began with another order."""
    view = pictures(repository, [(10 + number % 9, 10 + number % 7) for number in range(50)])
    whole = keys_of(load(view))
    first = load(view)
    iterator = iter(first)
    seen = [next(iterator).keys for _ in range(5)]
    state = first.state_dict()
    first.close()
    second = [load(view, rank=rank, world_size=2, batch_size=2) for rank in range(2)]
    for loader in second:
        loader.load_state_dict(state)
    assert seen + [left + right for left, right in zip(*map(keys_of, second), strict=True)] == whole


def test_grouped_batches_have_less_padding_and_every_pixel(repository):
    """What it is for; in an evaluation too."""
    drawn = np.random.default_rng(0)
    shapes = [(64, 48) if is_wide else (48, 64) for is_wide in drawn.integers(0, 2, 200)]
    view = pictures(repository, shapes)
    split = open_dataset(repository, "pictures")["train"]
    padding = {}
    for training in (True, False):
        for name, samples in (("plain", split), ("grouped", view)):
            options = {"batch_size": GROUP, "training": training, "ranks": DataRanks(), "size": Fit(longer=32)}
            with ImageLoader(samples, **options) as loader:
                parts = [(batch.padding.sum().item(), batch.padding.numel()) for batch in loader]
            padding[training, name] = sum(part for part, _ in parts) / sum(size for _, size in parts)
        assert padding[training, "grouped"] < 0.03
        assert padding[training, "plain"] > 0.1
