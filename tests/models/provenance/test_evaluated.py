"""Evaluation samples in the training data: by content, whatever their keys, and whether they were read."""

import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.loaders import ImageLoader, OrderConfig
from datasvc.models import ConsumptionTracker
from datasvc.models.provenance.evaluated import count_evaluated, find_evaluated
from tests.models.trainings import commit
from tests.samples import write_folder


@pytest.fixture
def repo(tmp_path):
    """`pets@1`: 10 samples in `train`, and in `val` copies of the first and the last, and one of its own."""
    folder = write_folder(tmp_path / "photos", {"train": {"cat": 10}, "val": {"cat": 1}})
    names = sorted((folder / "train" / "cat").iterdir())
    for source, name in ((names[0], "first"), (names[-1], "last")):
        (folder / "val" / "cat" / f"{name}.jpg").write_bytes(source.read_bytes())
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.datasets.ingest(str(folder), "pets", on_split_overlap="keep", keep_order=True)
    return repo


def test_copies_are_found_by_content_and_those_that_were_read_are_marked(repo):
    order = OrderConfig(shuffle=None)
    loader = ImageLoader(repo.dataset("pets@1")["train"], batch_size=5, training=True, size=16, order=order)
    tracker = ConsumptionTracker(loader)
    next(iter(loader))
    commit(repo.repository, "net", 1, [tracker.use()])
    found = find_evaluated(repo.repository, "net@1")
    assert found.evaluated == {"pets@1/val": 3}
    assert [(sample.key, sample.trained_key, sample.is_consumed) for sample in found.samples] == [
        ("cat/first.jpg", "cat/00000.jpg", True),
        ("cat/last.jpg", "cat/00009.jpg", False),
    ]
    few, counts = count_evaluated(repo.repository, "net@1", 1)
    assert (few.samples, few.evaluated, counts) == (found.samples[:1], found.evaluated, {"pets@1/val": (2, 1)})
    assert found.to_arrow().num_rows == len(found.to_json()["samples"]) == 2
    assert find_evaluated(repo.repository, "net@1", data="pets@1", split="train").samples[0].is_consumed
    with pytest.raises(ConfigError, match="no split 'test'"):
        find_evaluated(repo.repository, "net@1", split="test")
