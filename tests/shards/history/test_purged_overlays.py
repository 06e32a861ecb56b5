"""A purge takes the values of the purged samples beside shards out of every version, also if it is killed."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import datasvc.api.purge as purge_module
from datasvc.api.certificates import read_certificates
from datasvc.api.gc import gc
from datasvc.api.purge import purge
from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.models.transfer import transfer_datasets
from datasvc.repository import Repository
from datasvc.repository.logs.redactions import redaction_log
from datasvc.repository.removal import remove_versions
from datasvc.shards import open_dataset
from datasvc.shards.format import overlays
from datasvc.shards.format.overlays import sparse_table
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.history import edit_columns
from datasvc.shards.history.columns import add_column, compact, label, rename_column, set_column
from datasvc.shards.history.purged_overlays import empty_overlays
from datasvc.shards.versions import deletions
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.diff import diff
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.verify import verify
from tests.faults.test_kill import die_at
from tests.shards.written_versions import LABELLED_SCHEMA, labelled, write_version

KEYS = "abcdefghijkl"


def texts(*keys):
    return [f"the secret text of {key}" for key in keys]


def captions(*keys):
    return [f"the secret caption of {key}" for key in keys]


def corrections(*keys):
    return [f"another secret of {key}" for key in keys]


def secrets(*keys):
    return [*texts(*keys), *captions(*keys), *corrections(*keys)]


def column(name, keys, values):
    return pa.table({"key": list(keys), name: list(values)})


def captioned(text):
    """Return the schema of samples with a text and a caption."""
    return shard_schema(
        [pa.field("key", pa.string(), nullable=False), *(pa.field(name, pa.string()) for name in (text, "caption"))]
    )


def write(repository, name="pets", text="the secret text of {}"):
    """@1: a to l in three shards; @2: a caption each, dense; @3: others of a and e, sparse; @4: the text renamed."""
    samples = [{"key": key, "text": text.format(key)} for key in KEYS]
    write_version(repository, name, {"train": [samples[:4], samples[4:8], samples[8:]]})
    add_column(repository, name, "caption", column("caption", KEYS, captions(*KEYS)))
    set_column(repository, name, "caption", column("caption", "ae", corrections(*"ae")))
    rename_column(repository, name, "text", "words")


@pytest.fixture
def pets(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    write(repository)
    return repository


REFS = [f"pets@{number}" for number in range(1, 5)]


def files_with(folder, *found):
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [path.name for path in files if any(text.encode() in path.read_bytes() for text in found)]


def values(repository, ref, name):
    return {row["key"]: row[name] for row in open_dataset(Repository.open(repository.url), ref)["train"]}


def assert_purged(repository, keys, refs=REFS):
    """No file has a value of the samples, and the versions have all values of the others."""
    assert files_with(repository.url, *secrets(*keys)) == []
    for ref in refs:
        number = int(ref.rpartition("@")[2])
        for name, at in (("text", {1, 2, 3}), ("words", {4}), ("caption", {2, 3, 4})):
            if number not in at:
                continue
            of = corrections if name == "caption" and number > 2 else captions if name == "caption" else texts
            expected = dict(zip(KEYS, texts(*KEYS) if name != "caption" else captions(*KEYS), strict=True))
            expected |= dict(zip("ae", of(*"ae"), strict=True))
            assert values(repository, ref, name) == expected | dict.fromkeys(keys, "")
    assert_intact(repository, refs)


def assert_intact(repository, refs=REFS):
    for ref in refs:
        assert not verify(Repository.open(repository.url), ref, deep=True).problems


def sizes(repository, found):
    return sum(repository.objects.size(digest) for digest in found)


def test_no_file_has_a_value_of_a_purged_sample_and_all_versions_have_those_of_the_others(pets):
    before = [open_dataset(pets, ref)["train"].digest for ref in REFS]
    expected = purge(pets, "pets", keys=["a", "f"])
    # Captions: packs, directory, sparse. Digests: packs and directory of @2 and @4, sparse of @3.
    assert (expected.num_shards, expected.num_overlays) == (2, 8)
    retired = expected.size_bytes
    report = purge(pets, "pets", keys=["a", "f"], dry_run=False)
    assert (report.is_complete, report.num_overlays, report.size_bytes) == (True, 8, retired)
    assert report.proof.num_overlays == 8
    assert report.proof.unfinished == ()
    assert [open_dataset(pets, ref)["train"].digest for ref in REFS] == before
    assert_purged(pets, "af")
    (certificate,) = read_certificates(pets)
    assert (certificate["complete"], certificate["num_overlays"], certificate["proof"]["num_overlays"]) == (
        True,
        8,
        8,
    )
    again = purge(pets, "pets", keys=["a", "f"], dry_run=False)
    assert (again.is_complete, again.num_overlays, again.num_redacted) == (True, 0, 2)


def test_a_purged_sample_is_equal_in_versions_that_differed_in_it(pets):
    assert list(diff(pets, "pets@2", "pets@3").splits["train"].changed) == ["a", "e"]
    purge(pets, "pets", keys=["a"], dry_run=False)
    assert list(diff(Repository.open(pets.url), "pets@2", "pets@3").splits["train"].changed) == ["e"]
    index = overlays_index(pets)
    assert index["pets@2"] == index["pets@3"] != index["pets@4"]


def overlays_index(repository):
    """Return the sample digest of the first sample by version."""
    from datasvc.shards.format.overlaid_shard import read_index

    repository = Repository.open(repository.url)
    tables = {ref: open_dataset(repository, ref)["train"].table for ref in REFS}
    found = {ref: read_index(repository.objects, table, 0).table.column("sample")[0] for ref, table in tables.items()}
    return {ref: digest.as_py() for ref, digest in found.items()}


PURGE = """
from datasvc.api.purge import purge
from datasvc.repository import Repository
purge(Repository.open(sys.argv[2]), "pets", where="key in ('a', 'f')", dry_run=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        10,
        24,
        *(pytest.param(point, marks=pytest.mark.slow) for point in range(1, 70, 3) if point != 10),
        *(pytest.param(point, marks=pytest.mark.long) for point in range(2, 70) if point % 3 != 1 and point != 24),
    ],
)
def test_a_purge_killed_anywhere_goes_on_when_it_is_called_again(pets, point):
    die_at(point, PURGE, pets.url)
    assert_intact(pets)  # old or new, never a mix
    purge(Repository.open(pets.url), "pets@1", where="key in ('a', 'f')", dry_run=False)
    assert [each["complete"] for each in read_certificates(Repository.open(pets.url))][-1:] == [True]
    assert_purged(pets, "af")


def test_equal_corrections_of_another_data_set_stay(pets):
    write(pets, "others", "a public text of {}")
    purge(pets, "pets", keys=["a"], dry_run=False)
    assert values(pets, "others@3", "caption")["a"] == "another secret of a"
    assert values(pets, "others@2", "caption")["a"] == "the secret caption of a"
    # Nor do those that are written afterwards become redacted.
    write(Repository.open(pets.url), "later", "a public text of {}")
    assert values(pets, "later@3", "caption")["a"] == "another secret of a"
    assert_intact(pets, [*REFS, "others", "later"])


def test_an_object_of_an_earlier_release_that_may_be_of_two_data_sets_is_refused(pets, monkeypatch):
    monkeypatch.setattr(edit_columns, "sparse_table", lambda values, of, _: sparse_table(values, of))
    for name in ("one", "two"):
        write_version(pets, name, {"train": [[{"key": key, "text": f"{name} {key}"} for key in KEYS]]})
        add_column(pets, name, "score", column("score", "a", [0.5]))
    with pytest.raises(ConfigError, match="of an earlier release, which another data set may share"):
        purge(pets, "one", keys=["a"])


def test_a_version_that_is_committed_meanwhile_loses_its_values_too(pets, monkeypatch):
    real = purge_module.redact
    stale = Repository.open(pets.url)
    table = open_dataset(stale, "pets")["train"].table

    def late(*arguments, **options):
        monkeypatch.setattr(purge_module, "redact", real)
        real(*arguments, **options)
        assert table.shard(0) != open_dataset(pets, "pets")["train"].table.shard(0)
        set_column(pets, "pets", "caption", column("caption", "ab", ["a late secret of a", "that of b"]))

    monkeypatch.setattr(purge_module, "redact", late)
    report = purge(pets, "pets", keys=["a"], dry_run=False)
    assert report.is_complete
    assert files_with(pets.url, "a late secret of a", *secrets("a")) == []
    assert values(pets, "pets@5", "caption")["b"] == "that of b"
    assert_intact(pets, [*REFS, "pets@5"])


def test_values_that_no_version_has_make_the_certificate_incomplete_until_gc_deletes_them(pets):
    for dataset, key in (("pets", "a"), ("pets", "g")):
        set_column(pets, dataset, "caption", column("caption", [key], [f"lost secret of {key}"]), dry_run=True)
    label_like = column("score", KEYS, np.arange(1.0, 13.0))
    assert files_with(pets.url, "lost secret of") == []  # a dry run writes nothing
    set_column(pets, "pets", "caption", column("caption", "a", ["lost secret of a"]))
    add_column(pets, "pets", "score", label_like)
    for number in (5, 6):
        next((Path(pets.url) / "datasets" / "pets").rglob(f"*{number}.json")).unlink()  # as if killed before
    report = purge(Repository.open(pets.url), "pets", keys=["a"], dry_run=False)
    assert not report.is_complete
    # Captions and scores: sparse, pack.
    assert len(report.proof.unfinished) == 2
    gc(Repository.open(pets.url), grace_s=0, dry_run=False, no_writers=True)
    assert purge(Repository.open(pets.url), "pets", keys=["a"], dry_run=False).is_complete
    assert files_with(pets.url, "lost secret of a", *secrets("a")) == []


def test_copies_of_a_corrected_sample_are_found_by_its_digest(pets):
    sample = {"key": "copy", "text": texts("a")[0], "caption": corrections("a")[0]}
    write_version(
        pets, "copies", {"train": [[sample, {"key": "z", "text": "", "caption": "none"}]]}, captioned("text")
    )
    report = purge(pets, "pets", keys=["a"], dry_run=False)
    assert report.copies == (("copies", "train", "copy"),)
    # Also when the objects that had its digest are gone.
    assert purge(Repository.open(pets.url), "pets", keys=["a"]).copies == report.copies
    assert len(report.payloads) == 4  # of @1, @2, @3 and @4
    assert purge(pets, "pets", keys=["a"], copies=True, dry_run=False).is_complete
    assert files_with(pets.url, *secrets("a")) == []


@pytest.mark.parametrize("at_target", ["", "a", "f", "af"])
@pytest.mark.parametrize("at_source", ["", "a"])
def test_a_push_carries_what_replaced_values_and_brings_none_back(pets, tmp_path, at_source, at_target):
    target = Repository.create(str(tmp_path / "target"))
    transfer_datasets(pets, target, REFS[:3])
    if at_target:
        purge(target, "pets", keys=list(at_target), dry_run=False)
    if at_source:
        purge(pets, "pets", keys=list(at_source), dry_run=False)
    for _ in range(2):
        transfer_datasets(Repository.open(pets.url), Repository.open(target.url), REFS)
        assert_purged(target, sorted({*at_source, *at_target}))
    head = redaction_log(Repository.open(target.url).objects).read().head
    transfer_datasets(Repository.open(pets.url), Repository.open(target.url), REFS)
    assert redaction_log(Repository.open(target.url).objects).read().head == head


@pytest.mark.parametrize("shares_objects", [False, True])
def test_values_of_a_shard_that_a_version_leaves_out_stay_in_the_versions_that_have_it(
    pets, tmp_path, monkeypatch, shares_objects
):
    if shares_objects:
        monkeypatch.setattr(deletions, "_without_values", lambda objects, before, after: after)
    delete(pets, "pets", keys=list("abcd"))
    target = Repository.create(str(tmp_path / "target"))
    transfer_datasets(pets, target, REFS)
    purge(target, "pets", keys=["a"], dry_run=False)
    # Of @5 alone, the tables do not have the shard of the purged sample.
    transfer_datasets(Repository.open(pets.url), Repository.open(target.url), ["pets@5"])
    assert_purged(target, ["a"])
    assert values(target, "pets@5", "caption") == dict(zip("ijkl", captions(*"ijkl"), strict=True)) | {
        **dict(zip("fgh", captions(*"fgh"), strict=True)),
        "e": corrections("e")[0],
    }


def test_values_of_a_shard_that_no_version_has_are_in_no_file(pets, tmp_path):
    delete(pets, "pets", keys=list("abcd"))
    target = Repository.create(str(tmp_path / "target"))
    transfer_datasets(pets, target, ["pets@5"])
    assert files_with(target.url, *secrets(*"abcd")) == []
    assert values(target, "pets@1", "caption") == values(pets, "pets@5", "caption")
    assert_intact(target, ["pets@1"])


def test_a_cache_evicts_the_old_objects_and_reads_the_new_ones(pets, tmp_path):
    folder = tmp_path / "cache"
    with Cache(folder, budget="10MB") as cache:
        cache.stage(list(open_dataset(pets, "pets").values()))
    assert files_with(folder, *captions("f"))
    report = purge(pets, "pets", keys=["a", "f"], caches=[folder], dry_run=False)
    assert report.held == {str(folder): []}
    assert files_with(folder, *secrets("a", "f")) == []
    with Cache(folder) as cache:
        cache.stage(list(open_dataset(Repository.open(pets.url), "pets").values()))
        assert not cache.scrub().corrupt
    assert files_with(folder, *captions("b"))


def test_gc_keeps_the_new_objects_and_sweeps_the_old_ones_that_come_back(pets):
    old = [info.digest for info in open_dataset(pets, "pets@3")["train"].table.overlays.objects()]
    content = [pets.objects.read(digest) for digest in old]
    purge(pets, "pets", keys=["a"], dry_run=False)
    for each in content:
        pets.objects.put(each)
    assert gc(pets, grace_s=0, dry_run=False, no_writers=True).objects
    assert_purged(pets, "a")


def test_values_that_are_compacted_or_merged_after_a_purge_stay_empty(pets):
    purge(pets, "pets", keys=["a"], dry_run=False)
    compact(Repository.open(pets.url), "pets")
    write_version(pets, "more", {"train": [[{"key": "x", "words": "x", "caption": "y"}]]}, captioned("words"))
    merge(Repository.open(pets.url), ["pets@4", "more"], "all")
    for ref in ("pets@5", "all@1"):
        assert values(pets, ref, "caption")["a"] == values(pets, ref, "words")["a"] == ""
        assert values(pets, ref, "caption")["e"] == "another secret of e"
        split = open_dataset(Repository.open(pets.url), ref)["train"]
        assert split.is_purged(0)
    assert_purged(pets, "a")


def test_packs_without_a_purged_sample_are_not_written_again(pets, monkeypatch):
    monkeypatch.setattr(overlays, "PACK_BYTES", 100)
    add_column(pets, "pets", "other", column("other", KEYS, captions(*KEYS)))

    def packs():
        table = open_dataset(Repository.open(pets.url), "pets")["train"].table
        return [pack.digest for pack in table.overlays.groups[0].columns["other"].packs]

    before = packs()
    purge(pets, "pets", keys=["f"], dry_run=False)
    assert [old == new for old, new in zip(before, packs(), strict=True)] == [True, False, True]
    expected = dict(zip(KEYS, captions(*KEYS), strict=True))
    assert values(pets, "pets", "other") == expected | {"f": ""}


def test_a_removed_version_whose_packs_are_deleted_loses_what_is_left(pets):
    set_column(pets, "pets", "caption", column("caption", "b", ["a secret that is left of b"]))
    compact(pets, "pets")
    remove_versions(pets, "datasets", [f"pets@{number}" for number in range(1, 6)])
    gc(pets, grace_s=0, dry_run=False, no_writers=True)
    assert files_with(pets.url, "a secret that is left of b")
    report = purge(pets, "pets", keys=["a", "b"], dry_run=False)
    assert report.is_complete
    assert files_with(pets.url, "a secret that is left of b", *secrets("a", "b")) == []
    assert values(pets, "pets@6", "caption")["e"] == "another secret of e"


def test_numbers_become_zero_and_a_null_stays_null(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    splits = {"train": [labelled(**dict.fromkeys("abcdefgh", 0))]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA, ["cat", "dog"])
    label(repository, "pets", "key in ('a', 'b')", "dog")
    vectors = pa.array([[0.5, 1.5], [2.5, 3.5], None], pa.list_(pa.float32(), 2))
    add_column(repository, "pets", "vector", pa.table({"key": ["a", "b", "c"], "vector": vectors}))
    purge(repository, "pets", keys=["a", "c", "d"], dry_run=False)
    assert values(repository, "pets", "label") == {**dict.fromkeys("acdefgh", 0), "b": 1}
    found = {
        key: None if vector is None else list(vector) for key, vector in values(repository, "pets", "vector").items()
    }
    assert found == {**dict.fromkeys("cdefgh"), "a": [0.0, 0.0], "b": [2.5, 3.5]}
    assert purge(Repository.open(repository.url), "pets", keys=["a", "c", "d"]).num_overlays == 0


def test_what_is_left_to_empty_does_not_depend_on_how_often_it_was_asked(pets):
    table = open_dataset(pets, "pets@3")["train"].table
    rows = {table.shard(0).digest: np.array([0, 3])}
    planned = empty_overlays(pets.objects, [table], rows, dry_run=True)
    written = empty_overlays(pets.objects, [table], rows)
    assert planned.objects.keys() == written.objects.keys()
    assert planned.payloads == written.payloads
    assert sizes(pets, [info.digest for info in written.objects.values()])
    again = empty_overlays(pets.objects, [table, table], rows)
    assert again.objects == written.objects
