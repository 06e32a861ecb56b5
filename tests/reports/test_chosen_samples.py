"""Filters, weights, balanced classes and divisions: which samples a run gets, alone, resumed and on several ranks."""

import warnings
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from datasvc.api.purge import purge
from datasvc.errors import ConfigError
from datasvc.loaders import Mixture
from datasvc.loaders.torch import Dataset, OrderBatchSampler
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.views.named import save_view
from tests.loaders.numbered import Numbers
from tests.shards.written_versions import write_version

SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("blob", pa.large_binary(), nullable=False),
        pa.field("label", pa.int32()),
        pa.field("patient", pa.string()),
        pa.field("tags", pa.list_(pa.int64())),
    ]
)
CLASSES = tuple(f"class{number}" for number in range(60))  # a sample is its own class, so loaders tell its number
IN_ORDER = OrderConfig(shuffle=None)


def sample(number):
    patient = None if number == 41 else f"p{number // 4}"
    return {"key": f"k{number}", "blob": b"%d" % number, "label": number, "patient": patient, "tags": [number % 2]}


def write(repository, name, numbers, classes=CLASSES, **columns):
    """Write samples with these numbers as the next version, in shards of 13, and return its split."""
    samples = [{**sample(number), **{each: of(number) for each, of in columns.items()}} for number in numbers]
    shards = [samples[start : start + 13] for start in range(0, len(samples), 13)]
    write_version(repository, name, {"train": shards}, SCHEMA, classes=classes)
    return open_dataset(repository, name)["train"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return Repository.create(str(tmp_path_factory.mktemp("chosen") / "repo"))


@pytest.fixture(scope="module")
def split(repository):
    return write(repository, "rows", range(60))


def labels(view):
    return [each["label"] for each in view]


def served(samples, *, batch_size=5, epochs=1, ranks=1, **options):
    """Return the numbers that all ranks served, epoch by epoch, in the order of positions."""
    found = []
    for rank in range(ranks):
        with Numbers(samples, batch_size, rank=rank, world_size=ranks, **options) as loader:
            for epoch in range(epochs):
                found += [
                    (epoch, *pair)
                    for batch, numbers in loader
                    for pair in zip(batch.positions.tolist(), numbers, strict=True)
                ]
    return [number for _, _, number in sorted(found)]


def test_a_run_with_a_filter_resumes_with_the_samples_that_it_has_not_seen(split):
    """mosaicml/streaming#800, #247, fw-ai/cookbook#371: the position counted what was served, not what was read."""
    view = split.where("label % 3 <> 0")
    assert len(view) == 40
    loaders = [Numbers(view, 4, rank=rank, world_size=2) for rank in range(2)]
    streams = [iter(loader) for loader in loaders]
    head = [number for _ in range(3) for stream in streams for number in next(stream)[1]]
    state = loaders[0].state_dict()
    for loader in loaders:
        loader.close()
    rest = []
    for rank in range(4):
        with Numbers(view, 1, rank=rank, world_size=4) as loader:
            loader.load_state_dict(state)
            rest += [number for _, numbers in loader for number in numbers]
    assert sorted(head + rest) == [number for number in range(60) if number % 3]


def test_a_second_resume_within_an_epoch_continues_where_the_first_one_ended(split):
    """KempnerInstitute/KempnerForge#57, huggingface/accelerate#1451: the second skip counted from the first."""
    view = split.where("label < 50").weighted(weights=[1 + number % 2 for number in range(50)])
    whole, found, state = served(view, epochs=2), [], None
    for stop in (15, 25, 50, 75, 100):
        with Numbers(view, 5) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while len(found) < stop:
                for _, numbers in loader:
                    found += numbers
                    if len(found) == stop:
                        break
            state = loader.state_dict()
    assert found == whole


def test_a_filter_of_a_filter_and_of_a_part_has_the_rows_of_its_condition(split):
    """huggingface/datasets#3459, #5112: a filter after another one returned rows of the data before it."""
    first, second = split.split(0.5, 0.5, seed=1)
    for part in (first, second):
        view = part.where("label >= 20").where("label % 2 = 0")
        expected = [label for label in labels(part) if label >= 20 and label % 2 == 0]
        assert sorted(labels(view)) == sorted(expected)
        assert sorted(served(view)) == sorted(expected)
    assert sorted(labels(first) + labels(second)) == list(range(60))


def test_a_sample_without_a_value_is_not_unequal_to_one_but_distinct_from_it(split):
    """metabase/metabase#8486, lightdash/lightdash#4593: "is not" leaves out the rows without a value, as SQL does."""
    assert len(split.where("patient <> 'p0'")) == 55
    assert len(split.where("patient is distinct from 'p0'")) == 56


def test_a_filter_without_a_shuffle_gives_the_same_list_in_each_epoch(split):
    """mosaicml/streaming#749: a stream with `choose` had other samples in the second epoch."""
    view = split.take(0.5)
    assert served(view, epochs=2, order=IN_ORDER) == 2 * labels(view)


def test_samples_of_weight_0_are_never_served_however_small_the_other_weights_are(split):
    """pytorch/pytorch#48841, #125388: a draw had samples of weight 0, beside weights such as 2e-35."""
    for scale in (1, 2.1031e-35, 1e-304, 5e-324):
        view = split.weighted(weights=[scale * (number % 2) for number in range(60)])
        assert sorted(served(view)) == list(range(1, 60, 2))
    view = split.weighted(weights=[1e-310 * (1 + 2 * (number == 7)) for number in range(60)])
    counts = Counter(served(view, epochs=10))
    assert counts[7] == pytest.approx(30, abs=2)
    assert counts.keys() == set(range(60))


def test_a_weighted_epoch_of_several_ranks_is_that_of_one(split):
    """huggingface/accelerate#2865, pytorch/pytorch#77154: each process drew for itself, so ranks shared samples."""
    view = split.weighted(weights=[1 + 3 * (number < 6) for number in range(60)])
    assert served(view, batch_size=4, ranks=3, epochs=2) == served(view, batch_size=12, epochs=2)


def test_a_sampler_of_torch_says_that_it_ignores_weights(split):
    """Lightning-AI/pytorch-lightning#10946: another sampler took the place of the weighted one without a word."""
    view = split.weighted(weights=[1 + 3 * (number < 6) for number in range(60)])
    dataset = Dataset(view, columns=("label",))
    with pytest.warns(RuntimeWarning, match="has weights.*OrderBatchSampler"):
        assert len(list(DataLoader(dataset, batch_size=4, shuffle=True))) == 15
    batches = OrderBatchSampler(view, order=IN_ORDER, batch_size=5, tail="short")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = [n for batch in DataLoader(dataset, batch_sampler=batches) for n in batch["label"].tolist()]
    assert numbers == served(view, order=IN_ORDER)


def test_ranks_have_as_many_batches_when_a_filter_leaves_shards_unequal(split):
    """huggingface/datasets#6719, lance-format/lance#7366: ranks waited for one whose shards had fewer samples."""
    view = split.where("label < 14 or label in (30, 59)")  # 13, 1, 1, 0 and 1 samples of the shards
    for tail, num_batches in (("drop", 1), ("pad", 2)):
        numbers = []
        for rank in range(3):
            with Numbers(view, 4, rank=rank, world_size=3, tail=tail) as loader:
                batches = [(batch.mask, served) for batch, served in loader]
            assert len(batches) == num_batches
            numbers += [n for mask, served in batches for n, is_own in zip(served, mask, strict=False) if is_own]
        assert len(numbers) == len(set(numbers)) == {"drop": 12, "pad": 16}[tail]


def test_a_saved_view_has_its_samples_after_the_data_set_has_changed(repository):
    """voxel51/fiftyone-plugins#122: views that were saved before samples were deleted were of neither state."""
    before = write(repository, "changing", range(30)).where("label >= 20")
    save_view(repository, "late", before)
    write(repository, "changing", [*range(25), *range(40, 50)])
    assert labels(open_dataset(repository, "changing[late]")["train"]) == list(range(20, 30))
    with pytest.raises(ConfigError, match="is a view of changing@1; make one of changing@2"):
        open_dataset(repository, "changing@2[late]")


def test_a_small_data_set_is_repeated_until_a_large_one_is_read(repository, split):
    """Lightning-AI/litData#451: 2 samples and 50, half and half: all of the 50, and 25 copies of the 2."""
    large, small = split.where("label < 50"), split.where("label >= 58")
    mixture = Mixture({large: 1, small: 1}, block=10, epoch_samples=100)
    assert Counter(served(mixture)) == dict.fromkeys(range(50), 1) | {58: 25, 59: 25}


def test_classes_without_samples_have_no_weight_and_the_others_equal_shares(split):
    """scikit-learn/scikit-learn#32639, kiva12138/MITRL#3: a class that a filter left empty had an infinite weight."""
    view = split.where("class in ('class1', 'class2', 'class3') or patient = 'p9'").balanced("patient")
    counts = Counter(number // 4 for number in served(view, epochs=10))
    assert counts[0] == pytest.approx(counts[9], abs=4)
    with pytest.raises(ConfigError, match="selects no sample"):
        split.where("label > 100")


def test_classes_can_be_balanced_and_divided_by_their_names(repository):
    """The neighbour of the fault above: `class` was a column of conditions only."""
    view = write(repository, "named", range(60), classes=("a", "b"), label=lambda number: int(number > 4))
    assert view.balanced("class").weights.of(0).tolist() == view.balanced("label").weights.of(0).tolist()
    with pytest.raises(ConfigError, match="its columns are key, blob, label, patient, tags, class"):
        view.balanced("colour")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.25, 0.75], r"have the shape \(2,\)"),
        (["heavy"] * 60, "not all numbers"),
        ([[1.0], [1.0, 2.0]], "not all numbers"),
        (torch.ones(60, requires_grad=True), "not all numbers"),
        ({"class0": None, **dict.fromkeys(range(1, 60), 1)}, "has the weight nan"),
        (dict.fromkeys(range(61), 1), "has no class 60"),
        ({1.5: 1, **dict.fromkeys(range(60), 1)}, "has no class 1.5"),
        ({"class0": 2, **dict.fromkeys(range(60), 1)}, "class 0 has two weights"),
    ],
    ids=["per class", "text", "ragged", "gradient", "none", "no label", "no whole label", "twice"],
)
def test_weights_that_are_no_weights_of_the_samples_are_refused(split, weights, message):
    """deep-voice/soundbay#49: weights of the classes were taken for those of the first samples."""
    with pytest.raises(ConfigError, match=message):
        split.weighted(weights=weights)


def test_a_patient_is_on_the_same_side_when_data_were_added_and_reordered(repository):
    """scikit-learn/scikit-learn#31097, OHDSI/PatientLevelPrediction#181: new data moved cases to the other side."""
    sides = []
    for numbers in (range(40), [*range(59, 41, -1), *range(40)]):
        parts = write(repository, "cases", numbers).split(0.6, 0.4, by="patient", seed=4)
        sides.append([{each["patient"] for each in part} for part in parts])
        assert not sides[-1][0] & sides[-1][1]
        assert sum(map(len, parts)) == len(numbers)
    assert all(before <= after for before, after in zip(*sides, strict=True))


@pytest.mark.parametrize("column", ["tags", "blob"])
def test_groups_are_those_of_columns_with_one_value(split, column):
    """sunlabuiuc/PyHealth#1159: groups are checked; a column of lists or blobs has none."""
    with pytest.raises(ConfigError, match=f"the column '{column}' is .*; expected text, numbers"):
        split.split(0.5, 0.5, by=column)
    with pytest.raises(ConfigError, match=f"the column '{column}' is"):
        split.balanced(column)


@pytest.mark.slow
def test_purged_samples_belong_to_no_class_of_a_view_that_is_made_afterwards(repository):
    """treeverse/dvc#4903, pachyderm/pachyderm#4029: versions stay, without the bytes; what is empty is no value."""
    split = write(repository, "people", range(26), classes=("a", "b"), label=lambda number: int(number >= 13))
    before = split.balanced("label")
    purge(repository, "people", keys=[f"k{number}" for number in (1, 14, 15, 16, 25)], dry_run=False)
    split = open_dataset(repository, "people")["train"]  # the label of a purged sample is 0
    assert len(split.where("label = 0")) == 12
    assert len(split.where("class = 'b'")) == 9
    assert len(split.where("label >= 0").where("patient <> 'p0'")) == 26 - 5 - 3
    for view in (split.balanced("label"), split.weighted(weights={"a": 9, "b": 12})):
        assert view.table.label_counts == {0: 12, 1: 9}
        weights = np.concatenate([view.weights.of(shard) for shard in range(2)])
        assert weights[:12].sum() == pytest.approx(weights[12:].sum(), rel=1e-5)
    parts = split.split(0.5, 0.5, by="patient")
    assert sum(map(len, parts)) == 21
    assert len(open_dataset(repository, "people")["train"]) == len(before) == 26  # what was there stays as it was
