"""Weights of data sets that change while a run goes on."""

from collections import Counter

import numpy as np
import pytest

from datasvc.loaders import Mixture, MixtureStage
from datasvc.repository import Repository
from tests.loaders.numbered import Numbers, write_split


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("change") / "repo"))
    return write_split(repository, "a", [400, 500], 0), write_split(repository, "b", [300, 200], 1000)


def numbers_of(loader, epochs):
    return [number for _ in range(epochs) for _, numbers in loader for number in numbers]


def test_weights_that_change_at_a_checkpoint_lose_and_repeat_no_sample(pair):
    """NVIDIA/Megatron-LM#457, #725: from 1 : 1 to 2 : 1 at a checkpoint, A lost samples and B repeated some."""
    first, second = pair
    options = {"block": 30, "epoch_samples": 600}
    with Numbers(Mixture({first: 1, second: 1}, **options), 20) as loader:
        served = numbers_of(loader, 1)
        state = loader.state_dict()
    changed = Mixture({first: 1, second: 1}, stages=[MixtureStage(600, {first: 2, second: 1})], **options)
    with Numbers(changed, 15) as loader:
        loader.load_state_dict(state)
        served += numbers_of(loader, 2)
    own = [[number for number in served if (number < 1000) == is_first] for is_first in (True, False)]
    assert [len(each) for each in own] == [300 + 800, 300 + 400]
    for numbers, split in zip(own, pair, strict=True):
        size = len(split)
        assert sorted(numbers[:size]) == sorted(sample["label"] for sample in split)
        assert max(Counter(numbers).values()) == 2


def test_weights_are_a_function_of_the_samples_so_far(pair):
    """NVIDIA/Megatron-Energon#168: weights that go linearly from 9 : 1 to 1 : 9 over the training."""
    first, second = pair
    stages = [MixtureStage(20_000, {first: 1, second: 9}, ramp=True)]
    mixture = Mixture({first: 9, second: 1}, block=100, epoch_samples=20_000, stages=stages)
    sources = mixture.order(0).locate(0, np.arange(20_000)).sources
    shares = sources.reshape(200, 100).mean(axis=1)  # of the second one, in each block
    due = 0.1 + 0.8 * (np.arange(200) + 0.5) / 200
    assert np.abs(np.cumsum(shares - due) * 100).max() < 1
    with Numbers(mixture, 100) as loader:
        assert [int(batch.sources.sum()) for batch, _ in loader][-1] >= 89


def test_a_data_set_is_added_to_a_run_and_what_was_seen_is_not_repeated(pair):
    """NVIDIA/Megatron-Energon#52: its order depends on all data, so adding some is impossible there."""
    first, second = pair
    options = {"block": 30, "epoch_samples": 600}
    with Numbers(Mixture({first: 1}, **options), 20) as loader:
        served = numbers_of(loader, 1)
        state = loader.state_dict()
    grown = Mixture({first: 1, second: 0}, stages=[MixtureStage(600, {first: 1, second: 1})], **options)
    with Numbers(grown, 20) as loader:
        loader.load_state_dict(state)
        served += numbers_of(loader, 1)
    assert sorted(number for number in served if number < 1000) == list(range(900))


def test_schedules_multiply_with_the_weights_of_mixtures_inside(pair, tmp_path):
    """NVIDIA/Megatron-Energon#208: an outer schedule and constant inner weights are a product at every time."""
    first, second = pair
    third = write_split(Repository.create(str(tmp_path / "repo")), "c", [50], 2000)
    inner = Mixture({second: 3, third: 1})
    outer = Mixture({first: 1, inner: 1}, block=80, stages=[MixtureStage(800, {inner: 1}, ramp=True)])
    order = outer.order(0)
    # Halves of 40, 30 and 10; at the end of the ramp 1, 59 and 20 of a block, in means over its ten blocks.
    assert order.served_before(10) == [205, 446, 149]
    assert [stop - start for start, stop in zip(order.served_before(10), order.served_before(11), strict=True)] == [
        0,
        60,
        20,
    ]


def test_a_blend_is_reproducible_and_resumes_in_batches_of_other_sizes(pair):
    """modelscope/ms-swift#9555: stable indices by weight, a reproducible shuffle, and the same after a resume."""
    mixture = Mixture(dict(zip(pair, (7, 3), strict=True)), block=50, epoch_samples=500,
                      stages=[MixtureStage(200, {pair[1]: 1})])  # fmt: skip
    with Numbers(mixture, 25) as loader:
        whole = numbers_of(loader, 1)
    with Numbers(mixture, 10) as loader:
        head = [number for _, (_, numbers) in zip(range(17), loader, strict=False) for number in numbers]
        state = loader.state_dict()
    with Numbers(mixture, 5) as loader:
        loader.load_state_dict(state)
        assert head[:170] + numbers_of(loader, 1) == whole
