"""Samples that do not decode: raised or masked, named and counted."""

import pytest
import torch

from datasvc.errors import BadSampleError
from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.shards import ingest, open_dataset
from tests.samples import jpeg


def broken_jpeg(seed):
    """Return a photo whose Huffman table cannot be; header and end look right."""
    photo = bytearray(jpeg(seed=seed))
    table = photo.index(b"\xff\xc4")
    photo[table + 5 : table + 21] = b"\xff" * 16
    return bytes(photo)


@pytest.fixture
def split(repository, folder):
    """22 samples, two of them bad."""
    (folder / "train" / "b" / "bad.jpg").write_bytes(broken_jpeg(1))
    (folder / "train" / "c" / "worse.jpg").write_bytes(broken_jpeg(2))
    ingest(repository, str(folder), "pets")
    return open_dataset(repository, "pets")["train"]


def make(split, **options):
    return ImageLoader(
        split, **{"batch_size": 4, "training": True, "size": 32, "decode": DecodeConfig(num_threads=2), **options}
    )


@pytest.mark.parametrize("decode", ["cpu", "pillow"])
def test_bad_samples_are_masked_named_and_counted_and_the_rest_is_served(split, decode):
    with make(split, tail="short", columns=("key",), decode=DecodeConfig(backend=decode, on_bad="mask")) as loader:
        good, named = [], []
        for batch in loader:
            good += [key for key, kept in zip(batch.columns["key"], batch.mask.tolist(), strict=True) if kept]
            for index, reason in batch.bad.items():
                named.append(reason)
                assert not batch.mask[index]
                assert not batch.images[index].any()
        assert loader.num_bad == len(named) == 2
    assert len(set(good)) == 20
    assert not {"b/bad.jpg", "c/worse.jpg"} & set(good)
    assert sum("pets@1/train: 'b/bad.jpg' (row " in reason and "of shard" in reason for reason in named) == 1


def test_good_samples_of_a_batch_are_what_they_are_without_bad_ones(split):
    def images(on_bad):
        found = {}
        with make(split, tail="short", batch_size=1, decode=DecodeConfig(on_bad=on_bad)) as loader:
            for _ in range(22):
                try:
                    batch = next(iter(loader))
                except BadSampleError:
                    state = loader.state_dict()
                    loader.load_state_dict({**state, "position": state["position"] + 1})
                else:
                    if batch.mask.all():
                        found[int(batch.positions[0])] = batch.images[0]
        return found

    alone = images("raise")
    assert len(alone) == 20
    with make(split, tail="short", batch_size=22, decode=DecodeConfig(on_bad="mask")) as loader:
        batch = next(iter(loader))
    for position, image in alone.items():
        assert torch.equal(batch.images[batch.positions.tolist().index(position)], image)


def test_a_bad_sample_that_only_pads_is_nobodys_loss(split):
    """22 samples in 2 steps of 12: two pad."""
    with make(split, tail="pad", batch_size=12, decode=DecodeConfig(on_bad="mask")) as loader:
        served = list(loader)
        assert loader.num_bad == 2
    assert sum(int(batch.mask.sum()) for batch in served) == 20


def test_the_state_stands_before_the_batch_with_the_bad_sample(split):
    with make(split, shuffle=None, tail="short") as loader:
        with pytest.raises(BadSampleError, match=r"2 of 4 samples .* decode=DecodeConfig\(on_bad='mask'\)") as found:
            for batch in loader:
                after = int(batch.positions[-1]) + 1
        assert loader.state_dict()["position"] == after
        with pytest.raises(BadSampleError, match="2 of 4 samples") as again:
            next(iter(loader))
    assert str(found.value) == str(again.value)
