"""A purge removes the bytes of samples from every version and proves it, also if it is killed or others write."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import datasvc.api.purge as purge_module
from datasvc.api.certificates import read_certificates
from datasvc.api.gc import gc
from datasvc.api.purge import purge
from datasvc.cache import Cache
from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.transfer import transfer_datasets
from datasvc.repository import Repository, Storage
from datasvc.repository.logs.redactions import redaction_log
from datasvc.repository.removal import remove_versions
from datasvc.shards import ingest, open_dataset
from datasvc.shards.history import purged_rows
from datasvc.shards.history.columns import add_column, compact, label
from datasvc.shards.history.repair import delete_damaged
from datasvc.shards.images import thumbnail_cache
from datasvc.shards.images.thumbnail_cache import ThumbnailCache, image_name
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.describe import describe_dataset
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.redact import hashed_key
from datasvc.shards.versions.verify import verify
from tests.faults.test_kill import die_at
from tests.shards.written_versions import LABELLED_SCHEMA, create_pets, labelled, write_version

ROOT = Path(__file__).parents[2]


def sample(key, text=None, **columns):
    return {"key": key, "text": text or f"the secret text of {key}", **columns}


@pytest.fixture
def repository(tmp_path):
    """pets@1 has a to f in three shards; pets@2 is without f."""
    return create_pets(tmp_path / "repo", sample)


def files_with(folder, *texts):
    """Return the files that have one of the texts."""
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [path.name for path in found if any(text.encode() in path.read_bytes() for text in texts)]


def secret(*keys):
    return [f"the secret text of {key}" for key in keys]


def texts(repository, ref):
    return {row["key"]: row["text"] for row in open_dataset(Repository.open(repository.url), ref)["train"]}


def assert_intact(repository, *refs):
    for ref in refs:
        assert not verify(Repository.open(repository.url), ref, deep=True).problems


def test_no_file_has_the_bytes_of_a_purged_sample_and_all_versions_stay(repository):
    tables = [open_dataset(repository, ref)["train"].digest for ref in ("pets@1", "pets@2")]
    assert files_with(repository.url, *secret("a", "f"))
    report = purge(repository, "pets", keys=["a", "f"], dry_run=False)
    assert files_with(repository.url, *secret("a", "f")) == []
    assert report.is_complete
    assert report.versions == {"pets@1": 2, "pets@2": 1}  # f was deleted in the second
    assert report.num_shards == 2
    assert texts(repository, "pets@1") == {
        key: "" if key in "af" else f"the secret text of {key}" for key in "abcdef"
    }
    assert [open_dataset(repository, ref)["train"].digest for ref in ("pets@1", "pets@2")] == tables
    assert_intact(repository, "pets@1", "pets@2")


def test_a_dry_run_counts_and_changes_nothing(repository):
    before = sorted(path.name for path in Path(repository.url).rglob("*"))
    report = purge(repository, "pets", keys=["a", "b", "c"])
    assert (report.dry_run, report.num_shards, report.versions) == (True, 2, {"pets@1": 3, "pets@2": 3})
    assert report.size_bytes == sum(open_dataset(repository, "pets")["train"].table.bytes_per_shard[:2])
    assert sorted(path.name for path in Path(repository.url).rglob("*")) == before


def test_a_condition_selects_by_the_version_and_purges_the_keys_in_all(repository):
    report = purge(repository, "pets@1", where="text like '%of f' or key = 'c'", dry_run=False)
    assert report.keys == ("c", "f")
    assert files_with(repository.url, *secret("c", "f")) == []
    assert list((Path(repository.url) / "journal").glob("*/*")) == []  # it had the keys
    assert purge(repository, "pets", where="key = 'nobody'", dry_run=False).keys == ()


def test_keys_that_no_version_has_are_listed_and_nothing_is_done(repository):
    with pytest.raises(NotFoundError, match=r"2 keys are in no version of pets: 'x', 'y'"):
        purge(repository, "pets", keys=["a", "x", "y"], dry_run=False)
    assert files_with(repository.url, *secret("a"))
    report = purge(repository, "pets", keys=["a", "x"], missing="ok", dry_run=False)
    assert report.missing == ("x",)
    assert files_with(repository.url, *secret("a")) == []
    for wrong in ({}, {"keys": ["a"], "where": "true"}):
        with pytest.raises(ConfigError, match="either keys or a condition"):
            purge(repository, "pets", **wrong)


def test_the_certificate_names_samples_digests_time_and_author(repository, tmp_path):
    report = purge(repository, "pets", keys=["a"], by="dpo@example.org", message="request 7", dry_run=False)
    (certificate,) = read_certificates(repository, "pets")
    assert certificate["certificate"] == report.certificate
    assert (certificate["by"], certificate["message"], certificate["keys"]) == ("dpo@example.org", "request 7", ["a"])
    assert certificate["payloads"] == list(report.payloads)
    assert len(report.payloads) == 1
    assert certificate["complete"]
    assert certificate["when"].endswith("+00:00")
    gc(repository, grace_s=0, dry_run=False, no_writers=True)
    assert len(read_certificates(repository)) == 1
    assert read_certificates(repository, "others") == []


def test_hashed_keys_are_in_no_file_either(repository):
    key = "firstname.lastname"
    write_version(repository, "people", {"train": [[sample(key), sample("b")]]})
    report = purge(repository, "people", keys=[key], hash_keys=True, dry_run=False)
    assert report.keys == (hashed_key(key),)
    assert files_with(repository.url, key) == []
    # The key still finds what it was.
    assert purge(repository, "people", keys=[key]).num_redacted == 1


def test_keys_are_hashed_after_a_purge_that_kept_them(repository):
    key, twin = "firstname.lastname", "lastname.firstname"
    write_version(
        repository, "people", {"train": [[sample(key, "one text"), sample("b")], [sample(twin, "one text")]]}
    )
    purge(repository, "people", keys=[key, "unknown.person"], missing="ok", dry_run=False)
    assert len(files_with(repository.url, key)) == 3  # shard, sample index and certificate
    for _ in range(2):
        report = purge(
            repository, "people", keys=[key, "unknown.person"], missing="ok", hash_keys=True, dry_run=False
        )
        assert (report.missing, report.copies) == (("unknown.person",), (("people", "train", twin),))
        assert files_with(repository.url, key, "unknown.person") == []
    first, second, third = read_certificates(repository)
    assert first["keys"] == second["keys"] == third["keys"] == [hashed_key(key)]
    assert first["missing"] == second["missing"] == [hashed_key("unknown.person")]
    assert second["copies"] == [["people", "train", hashed_key(twin)]]
    assert_intact(repository, "people")
    gc(repository, grace_s=0, dry_run=False, no_writers=True)
    assert len(read_certificates(repository)) == 3


def test_two_purges_that_hash_keys_of_one_certificate_at_once_hash_those_of_both(repository, monkeypatch):
    names = ["first.person", "second.person"]
    write_version(repository, "people", {"train": [[sample(names[0]), sample("x")], [sample(names[1]), sample("y")]]})
    purge(repository, "people", keys=names, dry_run=False)
    real = purge_module._with_hashed_keys

    def interrupted(*arguments):
        monkeypatch.setattr(purge_module, "_with_hashed_keys", real)
        purge(Repository.open(repository.url), "people", keys=names[1:], hash_keys=True, dry_run=False)
        return real(*arguments)

    monkeypatch.setattr(purge_module, "_with_hashed_keys", interrupted)
    purge(repository, "people", keys=names[:1], hash_keys=True, dry_run=False)
    assert files_with(repository.url, *names) == []
    certificates = read_certificates(Repository.open(repository.url), "people")
    assert certificates[0]["keys"] == sorted(map(hashed_key, names))
    assert len(certificates) == 3


def test_thumbnails_of_all_shards_that_a_sample_was_in_are_removed(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(thumbnail_cache, "DEFAULT_FOLDER", tmp_path / "thumbnails")
    monkeypatch.setattr(purge_module, "image_columns", lambda _: ["image"])
    cache = ThumbnailCache(tmp_path / "thumbnails")

    def show(row):
        table = open_dataset(Repository.open(repository.url), "pets")["train"].table
        name = image_name(repository, table.index(0), table.shard(0).digest, row, "image")
        cache.get(name, lambda: None)

    show(0)
    show(1)
    assert purge(repository, "pets", keys=["a"], dry_run=False).thumbnails == 1
    show(1)
    report = purge(repository, "pets", keys=["b"], dry_run=False)
    assert (report.thumbnails, list((tmp_path / "thumbnails").glob("*/*"))) == (2, [])


def test_gc_keeps_the_new_shards_and_sweeps_the_old_ones_that_come_back(repository):
    old = {info.digest: info for info in open_dataset(repository, "pets")["train"].table.shards()}
    kept = {digest: repository.objects.read(digest) for digest in old}
    purge(repository, "pets", keys=["a", "c"], dry_run=False)
    for content in kept.values():
        repository.objects.put(content)  # such as a writer that ingests the same files, or a restored backup
    report = gc(repository, grace_s=0, dry_run=False, no_writers=True)
    assert len(report.objects) == 2
    assert_intact(repository, "pets@1", "pets@2")
    assert files_with(repository.url, *secret("a", "c")) == []


def test_a_second_purge_of_a_shard_redacts_further_samples(repository):
    purge(repository, "pets", keys=["a"], dry_run=False)
    purge(repository, "pets", keys=["b"], dry_run=False)
    one_by_one = open_dataset(Repository.open(repository.url), "pets")["train"].table
    assert one_by_one.redacted_rows(0).tolist() == [0, 1]
    assert_intact(repository, "pets@1")
    assert texts(repository, "pets")["a"] == texts(repository, "pets")["b"] == ""
    assert purge(repository, "pets", keys=["a", "b"]).num_redacted == 2


def test_two_purges_at_once_redact_the_samples_of_both(repository, monkeypatch):
    real = purged_rows.redact_shard

    def interrupted(*arguments, **options):
        monkeypatch.setattr(purged_rows, "redact_shard", real)
        purge(Repository.open(repository.url), "pets", keys=["b"], dry_run=False)
        return real(*arguments, **options)

    monkeypatch.setattr(purged_rows, "redact_shard", interrupted)
    assert purge(repository, "pets", keys=["a"], dry_run=False).is_complete
    assert files_with(repository.url, *secret("a", "b")) == []
    assert {key for key, text in texts(repository, "pets").items() if not text} == {"a", "b"}


def test_a_shard_that_another_purge_deletes_while_the_samples_are_searched_is_found_again(repository, monkeypatch):
    real = purge_module.read_all_tables

    def interrupted(*arguments):
        tables = real(*arguments)
        monkeypatch.setattr(purge_module, "read_all_tables", real)
        purge(Repository.open(repository.url), "pets", keys=["b"], dry_run=False)
        return tables

    monkeypatch.setattr(purge_module, "read_all_tables", interrupted)
    assert purge(repository, "pets", where="key = 'a'", dry_run=False).keys == ("a",)
    assert files_with(repository.url, *secret("a", "b")) == []


def test_a_version_that_is_committed_meanwhile_is_purged_too(repository, monkeypatch):
    real = purged_rows.delete_retired

    def late(*arguments):
        monkeypatch.setattr("datasvc.api.purge.delete_retired", real)
        # A writer that had read the table before, and adds the same sample in a shard of its own.
        write_version(repository, "pets", {"train": [[sample("a"), sample("z")]]})
        return real(*arguments)

    monkeypatch.setattr("datasvc.api.purge.delete_retired", late)
    report = purge(repository, "pets", keys=["a"], dry_run=False)
    assert report.is_complete
    assert files_with(repository.url, *secret("a")) == []
    assert texts(repository, "pets@3") == {"a": "", "z": "the secret text of z"}


def test_equal_bytes_under_other_keys_make_the_certificate_incomplete_until_they_are_purged(repository):
    write_version(repository, "other", {"val": [[sample("copy", secret("a")[0]), sample("q")]]})
    report = purge(repository, "pets", keys=["a"], dry_run=False)
    assert report.copies == (("other", "val", "copy"),)
    assert not report.is_complete
    assert purge(repository, "pets", keys=["a"], copies=True, dry_run=False).is_complete
    assert files_with(repository.url, *secret("a")) == []
    assert_intact(repository, "pets", "other")


def test_data_sets_that_share_a_shard_and_removed_versions_lose_the_sample_too(repository):
    write_version(repository, "more", {"train": [[sample("x")]]})
    merge(repository, ["pets@2", "more"], "all")
    remove_versions(repository, "datasets", ["pets@1"])
    report = purge(repository, "pets", keys=["a", "f"], dry_run=False)
    assert report.versions["all@1"] == 1
    assert files_with(repository.url, *secret("a", "f")) == []
    assert_intact(repository, "all", "pets@2")


def test_objects_that_no_version_has_are_read_and_deleted(repository):
    write_version(repository, "gone", {"train": [[sample("only"), sample("a")]]})
    table = open_dataset(repository, "gone")["train"].table
    for path in (Path(repository.url) / "datasets" / "gone").rglob("*.json"):
        path.unlink()  # such as the shards of an ingest that was killed
    report = purge(repository, "pets", keys=["a"], dry_run=False)
    assert table.shard(0).digest in report.proof.deleted
    assert files_with(repository.url, *secret("a")) == []


def test_copies_of_an_object_without_a_version_leave_quarantine_and_caches(repository, tmp_path):
    write_version(repository, "gone", {"train": [[sample("only"), sample("a")]]})
    split = open_dataset(repository, "gone")["train"]
    info = split.table.shard(0)
    caches = [tmp_path / "cache", tmp_path / "later"]
    for folder in caches:
        with Cache(folder, budget="10MB") as cache:
            cache.stage([split])
    for path in (Path(repository.url) / "datasets" / "gone").rglob("*.json"):
        path.unlink()
    quarantine = Path(repository.url) / "quarantine"
    quarantine.mkdir()
    (quarantine / f"{info.digest}.0a0b").write_bytes(repository.objects.read(info.digest)[:-1])
    assert purge(repository, "pets", keys=["a"], caches=caches[:1], dry_run=False).is_complete
    with Cache(caches[1]) as cache:  # such as that of another node
        cache.stage(list(open_dataset(Repository.open(repository.url), "pets").values()))
    assert files_with(tmp_path, *secret("a")) == []


def test_a_file_in_quarantine_that_no_object_explains_makes_the_certificate_incomplete(repository):
    (Path(repository.url) / "quarantine").mkdir()
    (Path(repository.url) / "quarantine" / f"{'ab' * 32}.0a0b").write_text(secret("a")[0])
    report = purge(repository, "pets", keys=["a"], dry_run=False)
    assert (report.proof.unreadable, report.is_complete) == (("ab" * 32,), False)


def test_a_damaged_object_without_a_version_makes_the_certificate_incomplete(repository):
    write_version(repository, "gone", {"train": [[sample("only"), sample("a")]]})
    info = open_dataset(repository, "gone")["train"].table.shard(0)
    for path in (Path(repository.url) / "datasets" / "gone").rglob("*.json"):
        path.unlink()
    path = repository.objects.local_path(info.digest)
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-1] + b"?")
    report = purge(repository, "pets", keys=["a"], dry_run=False)
    assert (report.proof.unreadable, report.is_complete) == ((info.digest,), False)


def test_a_quarantined_copy_that_a_job_has_mapped_is_reported(repository, tmp_path):
    with Cache(tmp_path / "cache", budget="10MB") as cache:
        cache.acquire(open_dataset(repository, "pets")["train"].table.shard(0), repository)
        purge(repository, "pets", keys=["a"], dry_run=False)
        first = cache.evict_retired(repository)
        assert cache.evict_retired(repository) == first != []  # it is in the quarantine of the cache now


def test_a_cache_evicts_the_old_shards_and_reads_the_new_ones(repository, tmp_path):
    folder = tmp_path / "cache"
    with Cache(folder, budget="10MB") as cache:
        cache.pin("pets", list(open_dataset(repository, "pets").values()))
    assert files_with(folder, *secret("a"))
    report = purge(repository, "pets", keys=["a"], caches=[folder], dry_run=False)
    assert report.held == {str(folder): []}
    assert files_with(folder, *secret("a")) == []
    with Cache(folder) as cache:
        cache.stage(list(open_dataset(Repository.open(repository.url), "pets").values()))
        assert not cache.scrub().corrupt


def test_staging_after_a_purge_evicts_what_another_node_had(repository, tmp_path):
    with Cache(tmp_path / "cache", budget="10MB") as cache:
        split = open_dataset(repository, "pets")["train"]
        cache.stage([split])
        held = split.table.shard(0)
        cache.acquire(held, repository)
        purge(repository, "pets", keys=["a", "c"], dry_run=False)
        assert cache.evict_retired(repository) == [held.digest]  # a job has it mapped
        cache.release(held.digest)
        cache.stage([open_dataset(repository, "pets")["train"]])
    assert files_with(tmp_path / "cache", *secret("a", "c")) == []


PURGE = """
from datasvc.api.purge import purge
from datasvc.repository import Repository
purge(Repository.open(sys.argv[2]), "pets", where="key in ('a', 'c', 'f')", dry_run=False)
"""


# It has 46 durable steps. The 47th point is an undisturbed purge.
@pytest.mark.parametrize(
    "point",
    [
        6,
        14,
        *(pytest.param(point, marks=pytest.mark.slow) for point in range(1, 48, 3)),
        *(
            pytest.param(point, marks=pytest.mark.long)
            for point in range(2, 48)
            if point % 3 != 1 and point not in (6, 14)
        ),
    ],
)
def test_a_purge_killed_anywhere_goes_on_when_it_is_called_again(repository, point):
    die_at(point, PURGE, repository.url)
    assert_intact(repository, "pets@1", "pets@2")  # old or new, never a mix
    purge(Repository.open(repository.url), "pets@1", where="key in ('a', 'c', 'f')", dry_run=False)
    assert [each["complete"] for each in read_certificates(Repository.open(repository.url))][-1:] == [True]
    assert files_with(repository.url, *secret("a", "c")) == []
    assert_intact(repository, "pets@1", "pets@2")


def test_a_dry_run_after_an_interrupted_purge_shows_what_its_condition_selected(repository, monkeypatch):
    arguments = {"ref": "pets", "where": "key in ('a', 'c')"}
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(purge_module, "search_objects", lambda *_: 1 / 0)
        purge(repository, **arguments, dry_run=False)
    before = {path: path.stat().st_mtime_ns for path in Path(repository.url).rglob("*")}
    for _ in range(2):
        report = purge(Repository.open(repository.url), **arguments)
        assert (report.keys, report.num_redacted) == (("a", "c"), 2)
    assert {path: path.stat().st_mtime_ns for path in Path(repository.url).rglob("*")} == before
    assert purge(repository, **arguments, dry_run=False).is_complete
    assert purge(repository, **arguments).keys == ()


def test_a_power_cut_loses_nothing_that_a_condition_selected(repository, monkeypatch):
    synced, is_synced, fsync, put_bytes = [], {}, os.fsync, Storage.put_bytes

    def seen(storage, path, content, **options):
        before = len(synced)
        put_bytes(storage, path, content, **options)
        is_synced[path.rpartition("/")[2]] = len(synced) > before

    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), fsync(file)))
    monkeypatch.setattr(Storage, "put_bytes", seen)
    purge(repository, "pets", where="key = 'a'", dry_run=False)
    assert is_synced["selected.json"]


@pytest.mark.parametrize("other", [[], ["b"], ["a"]])
def test_a_push_carries_redactions_and_never_brings_bytes_back(repository, tmp_path, other):
    target = Repository.create(str(tmp_path / "target"))
    transfer_datasets(repository, target, ["pets@1"])
    if other:
        purge(target, "pets", keys=other, dry_run=False)
    purge(repository, "pets", keys=["a"], dry_run=False)
    transfer_datasets(repository, target, ["pets@1", "pets@2"])
    assert files_with(target.url, *secret("a", *other)) == []
    assert_intact(target, "pets@1", "pets@2")
    empty = {key for key, text in texts(target, "pets@1").items() if not text}
    assert empty == {"a", *other}


def test_a_copy_of_an_old_backup_gets_the_redactions_of_the_target(repository, tmp_path):
    backup = tmp_path / "backup"
    subprocess.run(["cp", "-r", repository.url, backup], check=True)
    purge(repository, "pets", keys=["a", "f"], hash_keys=True, dry_run=False)
    target = Repository.create(str(tmp_path / "target"))
    transfer_datasets(repository, target, ["pets@1"])
    remove_versions(target, "datasets", ["pets@1"])
    gc(target, grace_s=0, dry_run=False, no_writers=True)  # the new shards are gone, the redactions are not
    transfer_datasets(str(backup), target, ["pets@2"])
    assert files_with(target.url, *secret("a", "f")) == []
    assert set(texts(target, "pets@2")) == {hashed_key("a"), *"bcde"}
    assert_intact(target, "pets@2")
    # Nor does a file of the backup that is copied into the repository.
    assert files_with(repository.url, *secret("a", "f")) == []


def test_every_type_of_column_is_emptied_and_the_label_counts_stay_positive(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    rows = [
        {
            "key": f"k{number}",
            "label": number % 3,
            "score": 0.5 + number,
            "words": ["w", str(number)],
            "text": "t" * 9,
        }
        for number in range(9)
    ]
    ingest(repository, rows, "rows")
    purge(repository, "rows", keys=["k4"], dry_run=False)
    split = open_dataset(Repository.open(repository.url), "rows")["train"]
    emptied = next(row for row in split if row["key"] == "k4")
    assert dict(emptied) == {"key": "k4", "label": 0, "score": 0.0, "words": [], "text": ""}
    delete(repository, "rows", keys=["k4", "k0", "k3", "k6"])
    assert open_dataset(repository, "rows")["train"].table.label_counts == {1: 3, 2: 3}


def test_an_append_after_a_purge_keeps_the_redactions(repository):
    purge(repository, "pets", keys=["a"], dry_run=False)
    write_version(repository, "more", {"train": [[sample("x")]]})
    merge(Repository.open(repository.url), ["pets@2", "more"], "again")
    table = open_dataset(Repository.open(repository.url), "again")["train"].table
    assert table.redacted_rows(0).tolist() == [0]
    stored = json.dumps([info.digest for info in table.shards()])
    assert not any(digest in stored for digest in redaction_log(repository.objects).read().retired)


@pytest.mark.parametrize("way", ["compact", "prefix", "append"])
def test_shards_that_are_written_again_keep_the_marks_of_purged_samples(repository, tmp_path, way):
    purge(repository, "pets", keys=["a"], dry_run=False)
    ref, prefix = "pets", ""
    if way == "compact":
        add_column(repository, "pets", "score", pa.table({"key": ["a", "d"], "score": [0.5, 1.5]}))
        compact(repository, "pets")
        remove_versions(repository, "datasets", ["pets@3"])
        gc(repository, grace_s=0, dry_run=False, no_writers=True)
    else:
        write_version(repository, "more", {"train": [[sample("x")]]})
        ref, prefix = "all", "p/"
        merge(repository, ["more", "pets"], ref, key_prefixes={"pets": prefix})
        if way == "append":
            write_version(repository, "later", {"train": [[sample("y")]]})
            merge(repository, [ref, "later"], ref := "again")
    assert describe_dataset(open_dataset(Repository.open(repository.url), ref))["splits"]["train"]["purged"] == 1
    # A later purge of the shard, a copy, and a version after both still list it.
    purge(repository, ref, keys=[f"{prefix}b"], copies=True, dry_run=False)
    delete(Repository.open(repository.url), ref, keys=[f"{prefix}c"])
    target = Repository.create(str(tmp_path / "target"))
    transfer_datasets(repository, target, [ref])
    for url in (repository.url, target.url):
        split = open_dataset(Repository.open(url), ref)["train"]
        purged = {split[number]["key"] for number in range(len(split)) if split.is_purged(number)}
        assert purged == {f"{prefix}a", f"{prefix}b"}
        assert_intact(Repository.open(url), ref)
    assert files_with(repository.url, *secret("a", "b")) == files_with(target.url, *secret("a", "b")) == []


def test_a_damaged_shard_is_stored_again_without_its_purged_samples(repository):
    purge(repository, "pets", keys=["a"], dry_run=False)
    table = open_dataset(repository, "pets")["train"].table
    (Path(repository.url) / repository.objects.path(table.index(0))).unlink()
    assert delete_damaged(repository, "pets").deleted == {"train": 1}
    assert set(texts(repository, "pets")) == set("bcde")
    assert_intact(repository, "pets")


def test_shards_that_differ_only_in_a_purged_sample_keep_the_digests_of_both(repository):
    for name, text in (("one", "first"), ("two", "second")):
        write_version(repository, name, {"train": [[sample("k", text), sample("z")]]})
    payloads = {*purge(repository, "one", keys=["k"]).payloads, *purge(repository, "two", keys=["k"]).payloads}
    for name in ("one", "two"):
        purge(repository, name, keys=["k"], dry_run=False)
    known = Repository.open(repository.url)
    assert len(payloads) == 2
    assert payloads == {each.payloads[0] for each in redaction_log(known.objects).read().by_shard.values()}


def test_a_lost_shard_is_purged_twice(repository):
    table = open_dataset(repository, "pets@1")["train"].table
    remove_versions(repository, "datasets", ["pets@1"])
    (Path(repository.url) / repository.objects.path(table.shard(0).digest)).unlink()
    purge(repository, "pets", keys=["a"], dry_run=False)
    purge(repository, "pets", keys=["b"], dry_run=False)
    assert purge(repository, "pets", keys=["a", "b"], dry_run=False).num_redacted == 2


def test_shards_without_a_sample_index_are_purged(repository, tmp_path):
    from datasvc.shards.versions.redact import redact_shard

    info = open_dataset(repository, "pets")["train"].table.shard(1)
    new, index = redact_shard(repository.objects, info, None, np.array([1]))
    content = pa.ipc.open_file(pa.BufferReader(repository.objects.read(new.digest))).read_all()
    assert content["text"].to_pylist() == ["the secret text of c", ""]
    assert repository.objects.size(index)


def test_a_condition_selects_no_purged_samples(repository):
    splits = {"train": [labelled(a=0, b=1), labelled(c=0, d=1)]}
    write_version(repository, "labels", splits, LABELLED_SCHEMA, ["cat", "dog"])
    purge(repository, "labels", keys=["b", "c", "d"], dry_run=False)
    repository = Repository.open(repository.url)
    assert purge(repository, "labels", where="class = 'cat'").keys == ("a",)
    assert label(repository, "labels", "label = 0", "dog", dry_run=True).changed == {"train": 1}
    assert delete(repository, "labels", where="label = 0", dry_run=True).deleted == {"train": 1}
