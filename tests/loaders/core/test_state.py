"""What a loader's state of a mixture says, and what it refuses."""

import pytest

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.loaders.core.mixture import Mixture
from datasvc.order import OrderConfig
from datasvc.shards.versions.dataset import Split, open_dataset
from tests.loaders.numbered import Numbers, make_splits, mix
from tests.shards.written_versions import LABELLED_SCHEMA, write_version


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
    with pytest.raises(ConfigError, match="has format 3; this datasvc reads the formats 1 and 2"):
        loader.load_state_dict({**state, "mixture_format": 3})
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


def _write_pets(repository, keys, **more):
    samples = [{"key": key, "blob": b"0", "label": 0} for key in keys]
    version = write_version(repository, "pets", {"train": [samples], **more}, LABELLED_SCHEMA)
    return open_dataset(repository, str(version))["train"]


def test_a_refused_state_names_the_versions(repository, tmp_path):
    first, second = _write_pets(repository, "ab"), _write_pets(repository, "abc")
    val = [[{"key": "v", "blob": b"0", "label": 0}]]
    _write_pets(repository, "ab", val=val)  # the samples of version 1 again
    state = Numbers(first, 1).state_dict()
    message = r"belongs to pets@1/train = pets@3/train, this loader reads pets@2/train; .* do not load the loader's"
    with pytest.raises(StateMismatchError, match=message):
        Numbers(second, 1).load_state_dict(state)
    with pytest.raises(
        StateMismatchError, match=r"one split, pets@1/train = pets@3/train, this loader reads Mixture"
    ):
        Numbers(Mixture([(second, 1)]), 1).load_state_dict(state)
    elsewhere = make_splits(tmp_path / "elsewhere")["big"]
    with pytest.raises(StateMismatchError, match=r"a data-set version that is not in this repository \(shard table"):
        Numbers(elsewhere, 1).load_state_dict(state)
    repository.storage.local_path("datasets/pets/versions/00000001.json").write_bytes(b"damage")
    with pytest.raises(StateMismatchError, match=r"belongs to pets@3/train, this loader reads pets@2/train"):
        Numbers(second, 1).load_state_dict(state)


def test_mixtures_of_equal_names_are_told_apart_by_their_tables(splits, tmp_path):
    others = make_splits(tmp_path)
    others["tiny"] = Split("train", "tiny@1", others["tiny"].repository, others["big"].digest)
    state = Numbers(Mixture([(splits["tiny"], 1)]), 1).state_dict()
    with pytest.raises(
        StateMismatchError, match=r"of tiny@1/train \(shard table \w+\.\.\.\), this loader reads one of tiny@1"
    ):
        Numbers(Mixture([(others["tiny"], 1)]), 1).load_state_dict(state)
