"""What a loader's state of a mixture says, and what it refuses."""

import pytest

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.loaders.core.mixture import Mixture
from datasvc.order import OrderConfig
from datasvc.shards.versions.dataset import Split
from tests.loaders.numbered import Numbers, make_splits, mix


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return make_splits(tmp_path_factory.mktemp("mixture"))


def test_a_state_of_other_samples_weights_or_order_is_refused_and_both_are_said(splits):
    loader = Numbers(mix(splits), 4)
    state = loader.state_dict()
    alone = Mixture([(splits["big"], 1)])
    others = [
        (Numbers(mix(splits, (5, 2, 3)), 4), r"weights=\[5, 3, 2\], this loader has mixture.weights=\[5, 2, 3\]"),
        (Numbers(mix(splits, epoch_samples=9), 4), "epoch_samples=54, this loader has mixture.epoch_samples=9"),
        (Numbers(mix(splits, block=20), 4), "mixture.block=10, this loader has mixture.block=20"),
        (Numbers(mix(splits), 4, order=OrderConfig(seed=8)), "seed=7, this loader has seed=8"),
        (Numbers(alone, 4), r"belongs to a mixture of big@1.*middle@1.*, this loader reads one of big@1"),
        (Numbers(splits["big"], 4), r"belongs to a mixture of big@1.*, this loader reads Split\(big@1/train"),
    ]  # fmt: skip
    for other, message in others:
        with pytest.raises(StateMismatchError, match=message):
            other.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"belongs to one split, .* this loader reads Mixture"):
        loader.load_state_dict(Numbers(splits["big"], 4).state_dict())
    with pytest.raises(StateMismatchError, match=r"position 55 is outside 0\.\.54"):
        loader.load_state_dict({**state, "position": 55})
    with pytest.raises(ConfigError, match="has format 2; this datasvc reads format 1"):
        loader.load_state_dict({**state, "mixture_format": 2})
    without = {name: value for name, value in state.items() if name != "mixture"}
    mixtures = [None, [], {}, {**state["mixture"], "splits": [1]}, {**state["mixture"], "more": 1}]
    changes = [{"position": -1}, {"epoch": "1"}, *({"mixture": each} for each in mixtures)]
    for broken in (without, *({**state, **change} for change in changes)):
        with pytest.raises(ConfigError, match="state of a mixture"):
            loader.load_state_dict(broken)


def test_a_version_that_is_opened_by_another_name_is_the_same(splits):
    loader = Numbers(mix(splits), 4)
    next(iter(loader))
    renamed = {
        name: Split(split.name, f"{name}@tag", split.repository, split.digest) for name, split in splits.items()
    }
    other = Numbers(mix(renamed), 4)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other))[1] == next(iter(loader))[1]
