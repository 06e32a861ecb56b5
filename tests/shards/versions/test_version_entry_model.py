"""Any sequence of appends, deletes and merges, against a model in memory: dictionaries from keys to samples."""

import shutil
import tempfile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datasvc.errors import ConflictError
from datasvc.repository import Repository, Resolved
from datasvc.shards import open_dataset
from datasvc.shards.versions.combine import append_splits
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.diff import diff
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.version_entry import describe_tables, read_tables
from tests.examples import examples
from tests.shards.written_versions import LABELLED_SCHEMA, write_table, write_version

CLASSES = ("ant", "bee", "cat", "dog")

keys = st.text("abc", min_size=1, max_size=2)
# A sample is its blob and the name of its class.
contents = st.dictionaries(keys, st.tuples(st.sampled_from([b"1", b"2"]), st.sampled_from(CLASSES)), min_size=1)
versions = st.dictionaries(st.sampled_from(["train", "val"]), contents, min_size=1)
names = st.sampled_from(["one", "two"])
rules = st.sampled_from(["fail", "drop", "first", "last"])
APPEND_RULES = {"fail": "fail", "drop": "drop", "first": "keep", "last": "replace"}


def combined(head, new, on_common):
    """Return what an append must give; None where it must refuse."""
    result = {split: dict(samples) for split, samples in head.items()}
    for split, samples in new.items():
        mine = result.setdefault(split, {})
        common = mine.keys() & samples.keys()
        if common and (
            on_common == "fail" or (on_common == "drop" and any(mine[key] != samples[key] for key in common))
        ):
            return None
        result[split] = {**mine, **samples} if on_common == "last" else {**samples, **mine}
    return result


class Versions(RuleBasedStateMachine):
    """The model is, by data set, the list of its versions; each by split, by key."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.repository = Repository.create(self.folder)
        self.model = {}
        self.digests = {}

    def teardown(self):
        shutil.rmtree(self.folder)

    @initialize(content=versions, data=st.data())
    def begin(self, content, data):
        for name in ("one", "two"):
            splits, classes = self.shards(content, data)
            write_version(self.repository, name, splits, LABELLED_SCHEMA, classes)
            self.model[name] = [content]

    @rule(name=names, content=versions, on_common=rules, data=st.data())
    def append(self, name, content, on_common, data):
        splits, classes = self.shards(content, data)
        objects = self.repository.objects
        new = {split: write_table(objects, shards, LABELLED_SCHEMA, classes) for split, shards in splits.items()}

        def build(head):
            tables = read_tables(self.repository, Resolved("datasets", name, head))
            appended = append_splits(objects, tables, new, on_common=APPEND_RULES[on_common])
            return {"message": "", "splits": describe_tables(objects, appended)}

        self.commit(
            name,
            combined(self.model[name][-1], content, on_common),
            lambda: self.repository.versions("datasets", name).append(build),
        )

    @rule(name=names, other=names, on_common=rules, data=st.data())
    def merge(self, name, other, on_common, data):
        version = data.draw(st.integers(1, len(self.model[other])))
        self.commit(
            name,
            combined(self.model[name][-1], self.model[other][version - 1], on_common),
            # What splits share is refused otherwise, see test_split_overlap.py.
            lambda: merge(
                self.repository,
                [name, f"{other}@{version}"],
                name,
                on_common=on_common,
                on_split_overlap="keep",
            ),
        )

    @rule(name=names, chosen=st.sets(keys), split=st.sampled_from(["train", "val", None]))
    def delete(self, name, chosen, split):
        head = self.model[name][-1]
        if split is not None and split not in head:
            return
        left = {
            each: {key: sample for key, sample in samples.items() if key not in chosen or split not in (None, each)}
            for each, samples in head.items()
        }
        if not all(left.values()):
            return
        report = delete(self.repository, name, keys=chosen, split=split, ignore_missing=True)
        present = {key for each, samples in head.items() if split in (None, each) for key in samples}
        assert report.missing == sorted(chosen - present)
        assert report.num_deleted == sum(len(head[each]) - len(left[each]) for each in head)
        if report.num_deleted:
            self.model[name].append(left)

    @rule(data=st.data())
    def diff(self, data):
        ends = []
        for _ in range(2):
            name = data.draw(names)
            ends.append((name, data.draw(st.integers(1, len(self.model[name])))))
        one, two = (self.model[name][version - 1] for name, version in ends)
        found = diff(self.repository, *(f"{name}@{version}" for name, version in ends))
        assert sorted(found.splits) == sorted({*one, *two})
        for split, each in found.splits.items():
            a, b = one.get(split, {}), two.get(split, {})
            assert sorted(each.added) == sorted(b.keys() - a.keys())
            assert sorted(each.deleted) == sorted(a.keys() - b.keys())
            assert sorted(each.changed) == sorted(key for key in a.keys() & b.keys() if a[key] != b[key])
            assert each.unchanged == sum(a[key] == b[key] for key in a.keys() & b.keys())

    @invariant()
    def every_version_reads_as_the_model_says_and_never_changes(self):
        for name, expected in self.model.items():
            assert self.repository.versions("datasets", name).head() == len(expected)
            for number, content in enumerate(expected, 1):
                dataset = open_dataset(Repository.open(self.folder), f"{name}@{number}")
                assert {split: self.samples(dataset[split]) for split in dataset} == content
                digests = {split: dataset[split].digest for split in dataset}
                assert self.digests.setdefault((name, number), digests) == digests

    @precondition(lambda self: self.model)
    @invariant()
    def labels_are_counted_exactly(self):
        for name in self.model:
            for split in open_dataset(self.repository, name).values():
                labels = [sample["label"] for sample in split]
                assert split.table.label_counts == {label: labels.count(label) for label in sorted(set(labels))}

    def commit(self, name, expected, action):
        if expected is None:
            with pytest.raises(ConflictError, match="on both sides"):
                action()
        else:
            action()
            self.model[name].append(expected)

    @staticmethod
    def shards(content, data):
        """Return splits of shards for `content`, and the class names that its labels index."""
        own = sorted({name for samples in content.values() for _, name in samples.values()})
        classes = data.draw(st.permutations(own))
        splits = {}
        for split, samples in content.items():
            size = data.draw(st.integers(1, 3))
            listed = [
                {"key": key, "blob": blob, "label": classes.index(name)} for key, (blob, name) in samples.items()
            ]
            splits[split] = [listed[start : start + size] for start in range(0, len(listed), size)]
        return splits, classes

    @staticmethod
    def samples(split):
        found = [(sample["key"], (sample["blob"], split.classes[sample["label"]])) for sample in split]
        assert len(found) == len(split) == len(dict(found))
        return dict(found)


TestVersions = Versions.TestCase
TestVersions.settings = examples(15, fast=5, stateful_step_count=12, deadline=None)
