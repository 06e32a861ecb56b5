"""Columns that are corrected, added, dropped and renamed; every operation on a data set that has such columns."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.api.gc import gc
from datasvc.cache import Cache
from datasvc.cache.peers.membership import FixedMembership
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.models.transfer import transfer_datasets
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.repository.branching import create_branch
from datasvc.repository.removal import remove_versions
from datasvc.shards import open_dataset
from datasvc.shards.export import export
from datasvc.shards.format.overlaid_shard import overlaid
from datasvc.shards.format.partial_reader import open_partial
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.history.columns import add_column, compact, drop_column, label, rename_column, set_column
from datasvc.shards.history.merge_branch import merge_branch
from datasvc.shards.history.repair import delete_damaged
from datasvc.shards.history.revert import revert
from datasvc.shards.query.query import query
from datasvc.shards.query.sample_page import read_page
from datasvc.shards.versions.combine import append_splits
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.diff import diff
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.verify import verify
from datasvc.shards.versions.version_entry import changed_entry
from tests.loaders.numbered import Numbers, sample_of
from tests.node.conftest import staged, two_nodes
from tests.shards.written_versions import LABELLED_SCHEMA, labelled, write_version

CLASSES = ["cat", "dog", "eel"]
KEY = pa.field("key", pa.string(), nullable=False)


@pytest.fixture
def pets(repository):
    """pets@1: train abc, de; val v."""
    splits = {"train": [labelled(a=0, b=1, c=0), labelled(d=1, e=0)], "val": [labelled(v=1)]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA, CLASSES)
    return repository


def values(repository, column, ref="pets", split="train"):
    """Return the values of a column by key, as `split[number]` has them."""
    return {sample["key"]: sample[column] for sample in open_dataset(repository, ref)[split]}


def source(**by_key):
    """Return a source of labels by key."""
    return pa.table({"key": list(by_key), "label": list(by_key.values())})


def test_a_corrected_label_is_in_the_next_version_and_no_shard_is_written(pets):
    before = open_dataset(pets, "pets@1")
    report = set_column(pets, "pets", "label", source(b="eel", v="cat"))
    assert (str(report.version), report.changed, report.nulls) == ("pets@2", {"train": 1, "val": 1}, {})
    assert values(pets, "label") == {"a": 0, "b": 2, "c": 0, "d": 1, "e": 0}
    assert values(pets, "label", "pets@1") == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}
    after = open_dataset(pets, "pets")
    assert after["train"].table.shards() == before["train"].table.shards()
    assert after["train"].table.label_counts == {0: 3, 1: 1, 2: 1}
    assert after.entry.content["change"] == {"kind": "columns", "operation": "set", "column": "label", "samples": 2}


def test_a_column_is_renamed_to_other_letters_and_back(pets):
    given = pa.table({"key": ["a", "e"], "score": [1, 2]})
    add_column(pets, "pets", "score", given, split="train")
    rename_column(pets, "pets", "label", "Label")
    rename_column(pets, "pets", "score", "Score", split="train")
    expected = {"a": 1, "b": None, "c": None, "d": None, "e": 2}
    assert values(pets, "Score") == expected
    rename_column(pets, "pets", "Score", "other", split="train")
    rename_column(pets, "pets", "other", "score", split="train")
    rename_column(pets, "pets", "Label", "name")
    rename_column(pets, "pets", "name", "label")
    assert values(pets, "score") == expected
    assert values(pets, "label") == values(pets, "label", "pets@1")
    compact(pets, "pets")
    assert values(pets, "score") == expected
    assert not verify(pets, "pets", deep=True).problems


def test_a_value_that_a_sample_has_already_changes_nothing(pets):
    report = set_column(pets, "pets", "label", source(b="dog", a="cat"))
    assert (str(report.version), report.changed) == ("pets@1", {})


def test_a_csv_file_names_its_column_of_keys_and_an_empty_value_is_null(pets, tmp_path):
    file = tmp_path / "relabel.csv"
    file.write_text("image,label\nb,eel\nd,\n", encoding="utf-8")
    report = set_column(pets, "pets", "label", str(file), key="image")
    assert (report.changed, report.nulls) == ({"train": 2}, {"train": 1})
    assert values(pets, "label") == {"a": 0, "b": 2, "c": 0, "d": None, "e": 0}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (source(b="bird"), ConfigError, "'bird': no such class; the classes are 'cat', 'dog', 'eel'"),
        (source(b=7), ConfigError, "label 7 has no class"),
        (source(b=0.5), ConfigError, "do not convert"),
        (source(b="eel", x="cat"), NotFoundError, "1 key is not in pets@1: 'x'"),
        (pa.table({"key": ["b", "b"], "label": ["cat", "dog"]}), ConfigError, "keys more than once: 'b'"),
        (pa.table({"id": ["b"], "label": ["cat"]}), ConfigError, "no column 'key' of keys"),
        (pa.table({"key": ["b"], "x": [1], "y": [1]}), ConfigError, "no column 'label'"),
        (pa.table({"key": ["b"], "label": [b"cat"]}), ConfigError, "holds bytes"),
    ],
)
def test_wrong_values_are_refused_and_nothing_is_committed(pets, given, error, message):
    with pytest.raises(error, match=message):
        set_column(pets, "pets", "label", given)
    assert pets.versions("datasets", "pets").head() == 1


def test_keys_that_are_missing_are_ignored_on_request(pets):
    report = set_column(pets, "pets", "label", source(b="eel", x="cat"), missing="ok")
    assert (report.changed, report.missing) == ({"train": 1}, ["x"])


def test_a_dry_run_counts_and_commits_nothing(pets):
    report = set_column(pets, "pets", "label", source(b="eel"), dry_run=True)
    assert (str(report.version), report.changed, report.dry_run) == ("pets@1", {"train": 1}, True)
    assert pets.versions("datasets", "pets").head() == 1


def test_a_column_is_added_with_null_for_the_samples_that_have_no_value(pets):
    report = add_column(pets, "pets", "score", pa.table({"key": ["a", "d"], "score": [0.5, 1.0]}), split="train")
    assert (report.changed, report.nulls) == ({"train": 2}, {"train": 3})
    assert values(pets, "score") == {"a": 0.5, "b": None, "c": None, "d": 1.0, "e": None}
    assert query(pets, "pets", "SELECT sum(score) AS total FROM train").to_pylist() == [{"total": 1.5}]
    with pytest.raises(ConfigError, match="has the column 'score' already"):
        add_column(pets, "pets", "score", pa.table({"key": ["a"], "score": [0.5]}), split="train")
    with pytest.raises(NotFoundError, match="no column 'score'"):
        set_column(pets, "pets", "score", pa.table({"key": ["a"], "score": [0.5]}), split="val")


def test_labels_by_name_are_added_to_data_that_had_none(repository):
    schema = shard_schema([KEY, pa.field("blob", pa.large_binary())])
    write_version(repository, "pets", {"train": [[{"key": key, "blob": key.encode()} for key in "abc"]]}, schema)
    add_column(repository, "pets", "label", source(a="dog", b="cat", c="dog"))
    split = open_dataset(repository, "pets")["train"]
    assert (split.classes, split.table.label_counts) == (("cat", "dog"), {0: 1, 1: 2})
    assert split.table.sample_schema.field("label") == pa.field("label", pa.int32(), nullable=False)
    assert [sample.class_name for sample in split] == ["dog", "cat", "dog"]


def test_samples_that_satisfy_a_condition_get_a_class_by_name(pets):
    report = label(pets, "pets", "label = 1 and key < 'd'", "eel")
    assert (report.changed, values(pets, "label")["b"]) == ({"train": 1}, 2)
    report = label(pets, "pets", "class = 'eel'", "dog")  # the condition is evaluated on the corrected labels
    assert (report.changed, values(pets, "label")["b"]) == ({"train": 1}, 1)
    with pytest.raises(ConfigError, match="no such class"):
        label(pets, "pets", "label = 1", "bird")


def test_columns_that_samples_are_made_of_cannot_be_changed(pets):
    for column in ("key", "blob"):
        with pytest.raises(ConfigError, match=f"'{column}'"):
            drop_column(pets, "pets", column)
        with pytest.raises(ConfigError, match=f"'{column}'"):
            rename_column(pets, "pets", "label", column)


def test_columns_with_names_that_cannot_be_added_can_be_set_renamed_and_dropped(repository):
    schema = shard_schema([KEY, *(pa.field(name, pa.int64()) for name in ("score", "Score", "a\tb"))])
    write_version(repository, "odd", {"train": [[{"key": "a", "score": 1, "Score": 2, "a\tb": 3}]]}, schema)
    set_column(repository, "odd", "Score", pa.table({"key": ["a"], "Score": [5]}))
    rename_column(repository, "odd", "Score", "points")
    drop_column(repository, "odd", "a\tb")
    assert open_dataset(repository, "odd")["train"][0] == {"key": "a", "score": 1, "points": 5}
    for new, message in (("SCORE", "ignores case"), ("a\tb", "printable")):
        with pytest.raises(ConfigError, match=message):
            rename_column(repository, "odd", "points", new)


def test_only_the_newest_version_can_be_changed(pets):
    set_column(pets, "pets", "label", source(b="eel"))
    with pytest.raises(ConflictError, match="not the newest version"):
        set_column(pets, "pets@1", "label", source(b="cat"))


def test_a_dropped_column_can_be_added_again_with_another_type(pets):
    rename_column(pets, "pets", "label", "label_old")
    drop_column(pets, "pets", "label_old", split="val")
    add_column(pets, "pets", "label_old", pa.table({"key": ["v"], "label_old": ["dog"]}), split="val")
    assert (values(pets, "label_old"), values(pets, "label_old", split="val")) == (
        {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0},
        {"v": "dog"},
    )
    assert open_dataset(pets, "pets")["train"].classes == tuple(CLASSES)  # for labels that are added again
    add_column(pets, "pets", "label", source(a="cat", b="cat", c="eel", d="dog", e="cat"), split="train")
    assert open_dataset(pets, "pets")["train"].table.label_counts == {0: 3, 1: 1, 2: 1}


def test_an_embedding_is_added_without_reading_a_blob(repository, monkeypatch):
    rng = np.random.default_rng(0)
    samples = [{"key": f"{number}", "blob": rng.bytes(100_000), "label": number % 3} for number in range(40)]
    write_version(repository, "pets", {"train": [samples[:20], samples[20:]]}, LABELLED_SCHEMA, CLASSES)
    stored = type(repository.objects)
    monkeypatch.setattr(stored, "local_path", lambda *_: None)
    monkeypatch.setattr(type(repository.storage), "local_path", lambda *_: None)
    read, read_range = [], type(repository.storage).read_range

    def counted(self, path, offset, length):
        read.append(length)
        return read_range(self, path, offset, length)

    monkeypatch.setattr(type(repository.storage), "read_range", counted)
    shards = {info.digest for info in open_dataset(repository, "pets")["train"].table.shards()}
    whole = stored.read

    def refuse_shards(self, digest, *args, **options):
        assert digest not in shards
        return whole(self, digest, *args, **options)

    monkeypatch.setattr(stored, "read", refuse_shards)
    vectors = rng.random((40, 768), np.float32)
    given = pa.table({"key": [sample["key"] for sample in samples], "vector": list(vectors)})
    add_column(repository, "pets", "vector", given)
    assert 0 < sum(read) < 200_000  # of 4 MB
    monkeypatch.undo()
    assert open_dataset(repository, "pets")["train"][7]["vector"] == vectors[7].tolist()


class Model:
    """A data set `pets`, and the samples that it should have, by key in the order of the split `train`."""

    schema = shard_schema(
        [KEY, pa.field("blob", pa.large_binary()), pa.field("label", pa.int32()), pa.field("text", pa.string())]
    )

    def __init__(self, repository, rng):
        self.repository, self.rng, self.names = repository, rng, ["label", "text"]
        self.samples, self.types, self.count = {}, {"label": pa.int32(), "text": pa.string()}, 0
        self.history = []
        write_version(repository, "pets", {"train": [self.new(30), self.new(20)]}, self.schema, CLASSES)

    def new(self, count):
        made = []
        for _ in range(count):
            key = f"k{self.count:03}"
            self.count += 1
            blob = self.rng.bytes(20) if self.count % 7 else None
            sample = {"key": key, "blob": blob, "label": int(self.rng.integers(3)), "text": f"text {key}"}
            self.samples[key] = {**dict.fromkeys(self.types), **sample}
            for name in ("label", "text"):
                if name not in self.types:
                    self.types[name] = self.schema.field(name).type
                    for other in self.samples.values():
                        other.setdefault(name, None)
            made.append(sample)
        return made

    def chosen(self, share):
        return [key for key in self.samples if self.rng.random() < share]

    def set(self, column, share):
        given = {key: self.value(column) for key in self.chosen(share)}
        table = pa.table(
            {"key": pa.array(given, pa.string()), column: pa.array(list(given.values()), self.types[column])}
        )
        set_column(self.repository, "pets", column, table)
        for key, value in given.items():
            self.samples[key][column] = value

    def value(self, column):
        if self.rng.random() < 0.1:
            return None
        number = int(self.rng.integers(3))
        if pa.types.is_string(self.types[column]):
            return f"new {number}"
        return [float(number)] * 3 if pa.types.is_list(self.types[column]) else number

    def add(self, column, data_type, share):
        self.types[column] = data_type
        for sample in self.samples.values():
            sample[column] = None
        given = {key: self.value(column) for key in self.chosen(share)}
        table = pa.table({"key": pa.array(given, pa.string()), column: pa.array(list(given.values()), data_type)})
        add_column(self.repository, "pets", column, table)
        for key, value in given.items():
            self.samples[key][column] = value

    def rename(self, column, new):
        rename_column(self.repository, "pets", column, new)
        self.types = {new if name == column else name: each for name, each in self.types.items()}
        for sample in self.samples.values():
            sample[new] = sample.pop(column)

    def drop(self, column):
        drop_column(self.repository, "pets", column)
        del self.types[column]
        for sample in self.samples.values():
            del sample[column]

    def delete(self, share):
        keys = self.chosen(share) or [next(iter(self.samples))]
        delete(self.repository, "pets", keys=keys)
        for key in keys:
            del self.samples[key]

    def delete_where(self):
        keys = [key for key, sample in self.samples.items() if sample["label"] == 2 and key > "k020"]
        delete(self.repository, "pets", where="label = 2 and key > 'k020'")
        for key in keys:
            del self.samples[key]

    def append(self):
        write_version(self.repository, "more", {"train": [self.new(10)]}, self.schema, ["eel", "cat", "dog"])
        for key in list(self.samples)[-10:]:  # the new classes have another order
            self.samples[key]["label"] = [2, 0, 1][self.samples[key]["label"]]
        self.commit(append_splits)

    def commit(self, combined):
        objects, tables = self.repository.objects, []
        for name in ("pets", "more"):
            tables.append({split: each.table for split, each in open_dataset(self.repository, name).items()})
        pets = open_dataset(self.repository, "pets")
        entry = changed_entry(pets, combined(objects, *tables), {"kind": "append"}, message="")
        self.repository.versions("datasets", "pets").append(lambda _head: entry)

    def check(self):
        split = open_dataset(self.repository, "pets")["train"]
        assert set(split.table.sample_schema.names) == {"key", "blob", *self.types}
        expected = list(self.samples.values())
        assert [dict(sample) for sample in split] == [
            {name: sample.get(name) for name in split.table.sample_schema.names} for sample in expected
        ]
        assert split.to_arrow(["key", *self.types]).to_pylist() == [
            {name: sample[name] for name in ["key", *self.types]} for sample in expected
        ]
        listed = ", ".join(["key", *self.types])
        rows = query(self.repository, "pets", f"SELECT {listed} FROM train").to_pylist()
        assert sorted(rows, key=lambda row: row["key"]) == [
            {name: sample[name] for name in ["key", *self.types]}
            for sample in sorted(expected, key=lambda each: each["key"])
        ]
        page = read_page(self.repository, "pets", count=1000).samples
        assert [sample.values.get("text") for sample in page] == [sample.get("text") for sample in expected]
        # An ingest of the corrected source has the same samples, by the digests of the sample indexes.
        fields = [split.table.sample_schema.field(name).with_nullable(True) for name in ("blob", *self.types)]
        schema = shard_schema([KEY, *fields])
        write_version(self.repository, "fresh", {"train": [expected]}, schema, CLASSES)
        changes = diff(self.repository, "fresh", "pets").splits["train"]
        assert [len(keys) for keys in (changes.added, changes.deleted, changes.changed)] == [0, 0, 0]
        assert changes.unchanged == len(expected)
        assert not changes.class_counts
        assert not verify(self.repository, "pets", deep=True).problems


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_operation_keeps_the_values_of_columns(repository, seed):
    model = Model(repository, np.random.default_rng(seed))
    vector = pa.list_(pa.float32())
    steps = [
        lambda: model.set("label", 0.1),
        lambda: model.set("label", 0.1),
        lambda: model.add("score", pa.int64(), 0.9),
        lambda: model.delete(0.2),
        lambda: model.add("vector", vector, 0.1),
        model.append,
        lambda: model.set("score", 0.1),
        lambda: model.set("label", 0.9),
        lambda: model.rename("text", "caption"),
        lambda: model.set("caption", 0.1),
        model.append,
        model.delete_where,
        lambda: model.set("vector", 0.5),
        lambda: model.drop("score"),
        lambda: model.add("score", pa.string(), 0.4),
        lambda: compact(repository, "pets"),
        lambda: model.set("label", 0.2),
    ]
    for step in steps:
        step()
        model.check()


def test_the_entry_of_compact_counts_samples(pets):
    set_column(pets, "pets", "label", source(b="eel"))
    report = compact(pets, "pets")
    assert report.changed == {"train": 3}  # of shard abc
    change = open_dataset(pets, "pets").entry.content["change"]
    assert change == {"kind": "columns", "operation": "compact", "samples": 3}


def test_a_diff_reads_no_more_than_the_samples_that_changed(pets):
    set_column(pets, "pets", "label", source(b="eel"))
    add_column(pets, "pets", "score", pa.table({"key": ["d"], "score": [1]}), split="train")
    changes = diff(pets, "pets@1", "pets@3").splits
    assert (list(changes["train"].changed), changes["train"].unchanged, len(changes["val"].changed)) == (
        ["b", "d"],
        3,
        0,
    )
    changes = diff(pets, "pets@2", "pets@3").splits["train"]
    assert (list(changes.changed), changes.unchanged) == (["d"], 4)


def test_versions_with_columns_are_combined_and_reverted(pets):
    write_version(pets, "zoo", {"train": [labelled(z=1, y=0)]}, LABELLED_SCHEMA, CLASSES)
    set_column(pets, "zoo", "label", source(z="eel"))
    set_column(pets, "pets", "label", source(b="eel"))
    merge(pets, ["pets", "zoo"], "both")
    assert values(pets, "label", "both") == {"a": 0, "b": 2, "c": 0, "d": 1, "e": 0, "z": 2, "y": 0}
    delete(pets, "both", keys=["a", "b", "c"], split="train")  # the other shards get other numbers
    assert values(pets, "label", "both") == {"d": 1, "e": 0, "z": 2, "y": 0}
    merge(pets, ["pets@1", "zoo"], "prefixed", key_prefixes={"zoo": "zoo/"})
    assert values(pets, "label", "prefixed")["zoo/z"] == 2
    revert(pets, "pets@1")
    assert values(pets, "label")["b"] == 1
    revert(pets, "pets@2")
    assert values(pets, "label")["b"] == 2


def test_a_branch_that_corrected_labels_is_merged(pets):
    create_branch(pets, "pets", "work")
    set_column(pets, "pets@work", "label", source(b="eel", d="cat"), split="train")
    delete(pets, "pets", keys=["a"], split="train")
    merge_branch(pets, "pets@work", "pets")
    assert values(pets, "label") == {"b": 2, "c": 0, "d": 0, "e": 0}
    assert not verify(pets, "pets", deep=True).problems


@pytest.mark.parametrize("is_deep", [False, True])
def test_verify_names_a_damaged_object_of_columns(pets, is_deep):
    set_column(pets, "pets", "label", source(b="eel"))
    add_column(pets, "pets", "score", pa.table({"key": list("abcde"), "score": list(range(5))}), split="train")
    overlays = open_dataset(pets, "pets")["train"].table.overlays
    for info in overlays.objects():
        path = pets.objects.local_path(info.digest)
        content = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(content[:-1])
        assert {problem.role for problem in verify(pets, "pets", deep=is_deep).problems} == {"columns"}
        path.write_bytes(content)
    assert not verify(pets, "pets", deep=is_deep).problems


def test_a_damaged_value_of_a_pack_is_never_returned(pets):
    add_column(pets, "pets", "score", pa.table({"key": list("abcde"), "score": list(range(5))}), split="train")
    (group,) = open_dataset(pets, "pets")["train"].table.overlays.groups
    path = pets.objects.local_path(group.columns["score"].packs[0].digest)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"\4\0\0\0\0\0\0\0", b"\5\0\0\0\0\0\0\0"))
    with pytest.raises(CorruptDataError, match="is corrupt from byte"):
        values(pets, "score")


def test_damaged_samples_are_deleted_and_the_others_keep_their_values(pets):
    add_column(pets, "pets", "score", pa.table({"key": list("abcde"), "score": list(range(5))}), split="train")
    set_column(pets, "pets", "label", source(c="eel", d="eel"))
    path = pets.objects.local_path(open_dataset(pets, "pets")["train"].table.shard(0).digest)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"blob of a", b"blob 0f a"))
    assert delete_damaged(pets, "pets").deleted == {"train": 1}
    assert values(pets, "label") == {"b": 1, "c": 2, "d": 2, "e": 0}
    assert values(pets, "score") == {"b": 1, "c": 2, "d": 3, "e": 4}
    assert not verify(pets, "pets", deep=True).problems


def test_columns_are_copied_to_another_repository_and_kept_by_gc(pets, tmp_path):
    set_column(pets, "pets", "label", source(b="eel"))
    add_column(pets, "pets", "score", pa.table({"key": list("abcde"), "score": list(range(5))}), split="train")
    there = Repository.create(str(tmp_path / "there"))
    transfer_datasets(pets, there, ["pets"])
    assert gc(there, grace_s=0, no_writers=True, dry_run=False).num_kept
    assert values(there, "label") == values(pets, "label")
    assert values(there, "score") == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}
    remove_versions(there, "datasets", ["pets@1"])
    packs = [
        pack.digest for part in open_dataset(pets, "pets")["train"].table.overlays.parts() for pack in part.packs
    ]
    assert packs
    gc(there, grace_s=0, no_writers=True, dry_run=False)
    assert [digest for digest in packs if there.objects.size(digest) is not None] == []


def test_an_export_has_the_values(pets, tmp_path):
    set_column(pets, "pets", "label", source(b="eel"))
    export(pets, "pets", str(tmp_path / "out"), format="parquet", split="train")
    written = pa.concat_tables(map(pq.read_table, (tmp_path / "out").rglob("*.parquet"))).select(["key", "label"])
    assert {row["key"]: row["label"] for row in written.to_pylist()} == values(pets, "label")


def test_equal_images_with_contradicting_labels_are_resolved(repository):
    samples = [{"key": key, "blob": b"one", "label": label} for key, label in (("a", 0), ("b", 1))]
    write_version(repository, "pets", {"train": [samples]}, LABELLED_SCHEMA, CLASSES)
    (conflict,) = verify(repository, "pets").conflicts
    assert (conflict.key, conflict.label) == ("b", "dog")
    label(repository, "pets", "key = 'b'", "cat")
    assert not verify(repository, "pets").conflicts


def test_a_shard_that_is_fetched_sample_by_sample_has_the_values(pets):
    set_column(pets, "pets", "label", source(b="eel"))
    add_column(pets, "pets", "score", pa.table({"key": list("abcde"), "score": list(range(5))}), split="train")
    table = open_dataset(pets, "pets")["train"].table
    partial = open_partial(pets.objects, table.shard(0), table.index(0))
    shard = overlaid(pets.objects, table, 0, partial)
    rows = np.array([1])
    partial.fetch(pets.objects, rows)
    assert [bytes(blob) for blob in shard.blobs("blob", rows)] == [b"blob of b"]
    assert (shard.values("label")[rows].tolist(), shard.values("score")[rows].tolist()) == ([2], [1])
    assert shard.is_valid("score", rows)
    assert shard.sample(1) == {"key": "b", "blob": b"blob of b", "label": 2, "score": 1}


@pytest.mark.parametrize("shuffle", ["global", "windowed"])
def test_batches_are_those_of_a_fresh_ingest_of_the_corrected_source(repository, shuffle):
    wrong = [[sample_of(number, LABELLED_SCHEMA) for number in range(start, start + 9)] for start in (0, 9)]
    write_version(repository, "fresh", {"train": wrong}, LABELLED_SCHEMA)
    changed = [[{**sample, "label": sample["label"] // 7} for sample in shard] for shard in wrong]
    write_version(repository, "pets", {"train": changed}, LABELLED_SCHEMA)
    given = pa.table({"key": [str(number) for number in range(18)], "label": list(range(18))})
    set_column(repository, "pets", "label", given)
    orders = OrderConfig(seed=3, shuffle=shuffle, **({"lanes": 1, "block": 4} if shuffle == "windowed" else {}))
    served = []
    for name in ("fresh", "pets"):
        with Numbers(open_dataset(repository, name)["train"], 4, order=orders) as loader:
            served.append([numbers for _, numbers in loader])
    assert served[0] == served[1]
    assert sorted(number for batch in served[1] for number in batch) == list(range(18))


@pytest.fixture
def away(tmp_path):
    """Return a repository of 18 samples with overlays, its split, and a function that takes the objects away."""
    repository = Repository.create(str(tmp_path / "origin"))
    wrong = [[sample_of(number, LABELLED_SCHEMA) for number in range(start, start + 9)] for start in (0, 9)]
    wrong[0][3]["label"] = 77
    write_version(repository, "pets", {"train": wrong}, LABELLED_SCHEMA)
    set_column(repository, "pets", "label", source(**{"3": 3}))  # sparse
    add_column(repository, "pets", "score", pa.table({"key": [str(n) for n in range(18)], "score": range(18)}))
    split = open_dataset(repository, "pets")["train"]
    assert split.table.num_shards == 2  # reads the table
    objects = tmp_path / "origin" / "objects"
    return split, lambda: objects.rename(tmp_path / "away")


def test_a_staged_split_is_served_with_its_overlays_without_the_origin(away, tmp_path):
    split, take_away = away
    with Cache(tmp_path / "cache", budget="10MB") as cache:
        assert cache.stage([split]).num_fetched == len(split.table.cached_objects()) == 2 + 5
        take_away()
        with Numbers(split, 6, cache=cache, order=OrderConfig(seed=3)) as loader:
            assert sorted(number for _, numbers in loader for number in numbers) == list(range(18))
        with pytest.raises(NotFoundError):
            split[3]


def test_a_pinned_overlay_is_not_evicted(away, tmp_path):
    split, take_away = away
    with Cache(tmp_path / "cache", budget="10MB") as cache:
        cache.pin("keep", [split])
        take_away()
        objects = cache.shards(split.repository).objects(split.table)
        shard = overlaid(objects, split.table, 0, cache.shards(split.repository).open_shard(split.table.shard(0)))
        assert shard.values("score").tolist() == list(range(9))
        assert {info.digest for info in split.table.cached_objects()} == cache.unpin("keep").objects.keys()


def test_peers_serve_the_overlays_that_they_have(away, tmp_path):
    split, take_away = away
    with two_nodes(tmp_path, split.repository.url) as nodes:
        assert staged(nodes[0])["state"] == "done"
        take_away()
        peers = Peers(FixedMembership([each.url for each in nodes], local_url=nodes[1].url))
        with Cache(tmp_path / "own", budget="10MB", peers=peers) as cache:
            report = cache.stage([split])
            assert (report.num_from_peers, report.num_from_origin) == (7, 0)
            with Numbers(split, 6, cache=cache, order=OrderConfig(seed=3)) as loader:
                assert sorted(number for _, numbers in loader for number in numbers) == list(range(18))


def test_a_cache_that_cannot_hold_the_split_leaves_overlays_at_the_origin(away, tmp_path):
    split, _ = away
    budget = split.table.size_bytes + 1000  # with the overlays, it is more
    with Cache(tmp_path / "cache", budget=budget) as cache:
        assert cache.shards(split.repository).objects(split.table) is split.repository.objects
