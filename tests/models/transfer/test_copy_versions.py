import os
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import datasvc
from datasvc.api.gc import gc, gc_at
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models import CodeRevision, DataUse, restore, save
from datasvc.models.registry.retention import remove
from datasvc.models.transfer import copying, transfer
from datasvc.models.transfer.copy_in_order import sort_topologically
from datasvc.models.transfer.copying import declare_intent
from datasvc.models.transfer.entries import TargetLogs
from datasvc.models.versions.signing import check_signed, load_private_key, make_key, sign
from datasvc.repository import ObjectInfo, Objects, Repository, Resolved
from datasvc.repository.logs.log import Log, encode_entry
from datasvc.repository.removal import remove_versions
from datasvc.repository.store import file_age
from datasvc.shards import ingest, open_dataset
from datasvc.shards.history.rename import rename
from datasvc.shards.versions.version_entry import read_val_fraction
from tests.models.stored import flip_last_byte
from tests.progress import RecordedProgress
from tests.samples import write_folder


def state(seed):
    made = torch.Generator().manual_seed(seed)
    return {"model": {"frozen": torch.ones(200, 200), "w": torch.randn(300, 200, generator=made)}, "step": seed}


# Not what this checkout has: local changes would be one object more.
NO_CODE = CodeRevision(None, dirty=False)


def train(repository, name="net", versions=3, first=0):
    for number in range(first, first + versions):
        head = repository.versions("models", name).head()
        parent = f"{name}@{head}" if head else None
        about = {"step": number, "parent": parent, "metrics": {"top1": number / 10}}
        save(repository, name, state(number), code=NO_CODE, **about)
    return repository


def told(report):
    return [(str(each.source), str(each.target), each.is_new) for each in report.versions]


def equal_state(a, b, ref_a, ref_b):
    a, b = restore(a, ref_a).state, restore(b, ref_b).state
    return a["step"] == b["step"] and all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


@pytest.fixture(params=["local", "s3"])
def target(request, tmp_path):
    if request.param == "local":
        return Repository.create(str(tmp_path / "target"))
    return Repository.create(f"{request.getfixturevalue('s3_bucket')}/{secrets.token_hex(8)}")


@pytest.fixture
def other(tmp_path):
    return Repository.create(str(tmp_path / "other"))


def objects(repository):
    return {path.name for path in repository.storage.local_path("objects").glob("*/*")}


def test_versions_arrive_whole_in_order_and_once_and_go_back_as_themselves(repository, target):
    train(repository)
    report = transfer(repository, target, ["net@3"])
    assert told(report) == [("net@3", "net@1", True)]
    again = transfer(repository, target, ["net@3", "net@2"], with_parents=True)
    assert told(again) == [("net@1", "net@2", True), ("net@2", "net@3", True), ("net@3", "net@1", False)]
    assert equal_state(repository, target, "net@3", "net@1")
    assert equal_state(repository, target, "net@2", "net@3")
    entry = target.entry(target.resolve("models", "net@3")).content
    assert entry["parent"] == "net@2"
    assert entry["metrics"] == {"top1": 0.1}
    source = repository.entry(repository.resolve("models", "net@2")).content
    assert entry["origin"] == {
        "repository": repository.url,
        "version": "net@2",
        "commit": source["commit"],
        "created": source["created"],
        "parents": ["net@1"],
    }
    lone = target.entry(target.resolve("models", "net@1")).content
    assert (lone["parent"], lone["origin"]["parents"]) == (None, ["net@2"])
    # The frozen tensor is one object, wherever the others lie.
    # Of each version state, table and what its tensor adds; the frozen tensor and the chains moved with the first.
    assert (report.num_objects, again.num_objects) == (4, 6)
    assert told(transfer(target, repository, ["net@1", "net@3"])) == [
        ("net@1", "net@3", False),
        ("net@3", "net@2", False),
    ]


def test_only_missing_objects_move(repository, other):
    train(repository, versions=1)
    first = transfer(repository, other, ["net"])
    assert first.num_objects == len(objects(other))
    save(repository, "net", {**state(0), "step": 9}, step=9, code=NO_CODE)
    progress = RecordedProgress()
    second = transfer(repository, other, ["net"], progress=progress)
    assert second.num_objects == 1  # the state: all tensors, and so their table, are those of before
    assert progress.totals == [progress.total]
    assert progress.total > second.bytes
    assert transfer(repository, other, ["net"]).bytes == 0


def test_a_model_may_have_another_name_there_and_a_stranger_keeps_its_number(repository, other):
    train(repository, versions=2)
    train(other, versions=1, first=50)
    assert told(transfer(repository, other, ["net"], with_parents=True)) == [
        ("net@1", "net@2", True),
        ("net@2", "net@3", True),
    ]
    assert other.entry(other.resolve("models", "net@3")).content["parent"] == "net@2"
    assert equal_state(repository, other, "net@2", "net@3")
    transfer(repository, other, ["net@1", "net@2"], name="theirs")
    assert other.entry(other.resolve("models", "theirs@2")).content["parent"] == "theirs@1"
    train(repository, "second", versions=1)
    with pytest.raises(ConfigError, match="2 models cannot all get the name 'x'"):
        transfer(repository, other, ["net", "second"], name="x")
    with pytest.raises(ConfigError, match="is both source and target; give two"):
        transfer(repository, Repository.open(repository.url), ["net"])


def test_merged_parents_come_before_what_was_made_of_them(repository, other):
    train(repository, "a", versions=2)
    train(repository, "z", versions=1)
    log = repository.versions("models", "a")
    content = {
        field: value for field, value in log.read(2).content.items() if field not in {"commit", "created", "format"}
    }
    log.append(lambda _head: {**content, "parent": "a@2", "merged": ["z@1", "gone@4"]})
    report = transfer(repository, other, ["a@3"], with_parents=True)
    assert [str(each.source) for each in report.versions] == ["a@1", "a@2", "z@1", "a@3"]
    entry = other.entry(other.resolve("models", "a@3")).content
    assert (entry["parent"], entry["merged"]) == ("a@2", ["z@1"])
    assert entry["origin"]["parents"] == ["a@2", "z@1", "gone@4"]


@given(st.dictionaries(st.integers(1, 12), st.lists(st.integers(1, 12), max_size=3)))
def test_parents_go_first_where_no_version_is_its_own_ancestor(edges):
    def version(number):
        return Resolved("models", "net", number)

    # An honest parent is older; others are what a hostile entry may say.
    parents = {version(child): [version(each) for each in named] for child, named in edges.items()}
    ordered = sort_topologically(parents)
    assert sorted(ordered, key=str) == sorted(parents, key=str)
    honest = {child: [each for each in named if each.version < child.version] for child, named in parents.items()}
    place = {each: number for number, each in enumerate(sort_topologically(honest))}
    assert all(place[each] < place[child] for child, named in honest.items() for each in named if each in place)


def ingest_pets(repository, tmp_path, seed, name="pets"):
    ingest(repository, str(write_folder(tmp_path / seed, {"train": {seed: 9}})), name)


def use_of(repository, ref):
    table = open_dataset(repository, ref)["train"].digest
    return DataUse(ref, "train", {"version": table, "position": 3})


def test_data_sets_come_along_and_are_named_as_they_are_called_there(repository, other, tmp_path):
    ingest_pets(repository, tmp_path, "x")
    ingest_pets(other, tmp_path, "y")
    save(repository, "net", state(0), step=0, data=[use_of(repository, "pets@1")])
    transfer(repository, other, ["net"], name="alone")
    assert other.entry(other.resolve("models", "alone")).content["data"][0]["dataset"] == "pets@1"
    report = transfer(repository, other, ["net"], with_data=True, data_names={"pets": "theirs"})
    assert told(report) == [("pets@1", "theirs@1", True), ("net@1", "net@1", True)]
    assert other.entry(other.resolve("models", "net")).content["data"][0]["dataset"] == "theirs@1"
    ours, theirs = open_dataset(repository, "pets@1")["train"], open_dataset(other, "theirs@1")["train"]
    assert theirs.digest == ours.digest
    assert objects(repository) <= objects(other)
    assert other.versions("datasets", "pets").head() == 1
    # What was renamed once may be named again, also where the data set itself stays behind.
    again = transfer(repository, other, ["net"], with_data=True, data_names={"pets": "theirs"})
    assert [each.is_new for each in again.versions] == [False, False]
    transfer(repository, other, ["net"], name="later", data_names={"pets": "theirs"})
    assert other.entry(other.resolve("models", "later")).content["data"][0]["dataset"] == "theirs@1"


@pytest.mark.parametrize("names", [["animals"], ["animals", "beasts"]])
def test_a_data_set_that_was_renamed_after_the_training_comes_along_by_its_new_name(
    repository, other, tmp_path, names
):
    ingest_pets(repository, tmp_path, "x")
    save(repository, "net", state(0), step=0, data=[use_of(repository, "pets@1")])
    for old, new in pairwise(["pets", *names]):
        rename(repository, old, new)
    report = transfer(repository, other, ["net"], with_data=True)
    assert told(report) == [(f"{names[-1]}@1", f"{names[-1]}@1", True), ("net@1", "net@1", True)]
    copied = other.entry(other.resolve("models", "net")).content["data"][0]["dataset"]
    assert copied == f"{names[-1]}@1"
    assert open_dataset(other, copied)["train"].digest == open_dataset(repository, copied)["train"].digest


def test_a_data_set_that_was_copied_before_it_was_renamed_is_not_copied_again(repository, other, tmp_path):
    ingest_pets(repository, tmp_path, "x")
    for step in (0, 1):
        save(repository, "net", state(step), step=step, data=[use_of(repository, "pets@1")])
    transfer(repository, other, ["net@1"], with_data=True)
    rename(repository, "pets", "animals")
    report = transfer(repository, other, ["net@2"], with_data=True)
    assert told(report) == [("pets@1", "pets@1", False), ("net@2", "net@2", True)]
    assert other.names("datasets") == ["pets"]


def test_data_that_was_removed_and_not_renamed_does_not_come_along(repository, other, tmp_path):
    ingest_pets(repository, tmp_path, "x")
    save(repository, "net", state(0), step=0, data=[use_of(repository, "pets@1")])
    remove_versions(repository, "datasets", ["pets@1"], message="wrong")
    with pytest.raises(NotFoundError, match=r"pets@1 was removed .*\(wrong\).*; without --with-data"):
        transfer(repository, other, ["net"], with_data=True)
    assert (other.names("datasets"), other.names("models")) == ([], [])


def old_entry(repository, tmp_path, name):
    """Return an entry as versions had it that did not say which share is held out."""
    ingest_pets(repository, tmp_path, "a", name)
    new = {"format", "commit", "created", "checksum", "val_fraction"}
    content = repository.entry(Resolved("datasets", name, 1)).content
    return {field: value for field, value in content.items() if field not in new}


@pytest.mark.parametrize("change", ["append", "merge"])
def test_an_old_data_set_that_comes_along_holds_out_the_share_that_it_had(repository, other, tmp_path, change):
    old = old_entry(repository, tmp_path, "pets")
    log = repository.versions("datasets", "old")
    log.append(lambda _head: {**old, "source": {"options": {"val_fraction": 0.2}}})
    parent = "old@1" if change == "append" else None
    log.append(lambda _head: {**old, "parent": parent, "change": {"kind": change, "versions": ["old@1"]}})
    save(repository, "net", state(0), code=NO_CODE, step=0, data=[use_of(repository, "old@2")])
    transfer(repository, other, ["net"], with_data=True)
    assert read_val_fraction(repository, Resolved("datasets", "old", 2)) == 0.2
    assert read_val_fraction(other, Resolved("datasets", "old", 1)) == 0.2


def test_a_merge_from_elsewhere_does_not_follow_names_that_are_others_here(repository, tmp_path):
    old = old_entry(repository, tmp_path, "pets")
    repository.versions("datasets", "pets").append(lambda _head: {**old, "val_fraction": 0.7})
    moved = {**old, "origin": {"commit": "c"}, "change": {"kind": "merge", "versions": ["pets@2"]}}
    repository.versions("datasets", "moved").append(lambda _head: moved)
    assert read_val_fraction(repository, Resolved("datasets", "moved", 1)) == 0.0


def test_nothing_is_appended_to_an_unrelated_data_set(repository, other, tmp_path):
    ingest_pets(repository, tmp_path, "x")
    ingest_pets(other, tmp_path, "y")
    save(repository, "net", state(0), step=0, data=[use_of(repository, "pets@1")])
    before = objects(other)
    progress = RecordedProgress()
    with pytest.raises(ConfigError, match=r"has another data set 'pets'.*--rename-data pets=NAME"):
        transfer(repository, other, ["net"], with_data=True, progress=progress)
    assert (progress.totals, objects(other), other.names("models")) == ([], before, [])
    assert other.versions("datasets", "pets").head() == 1


def test_an_unrelated_data_set_that_appears_during_a_transfer_is_not_appended_to(repository, other, tmp_path):
    ingest_pets(repository, tmp_path, "x")
    save(repository, "net", state(0), step=0, data=[use_of(repository, "pets@1")])
    progress = RecordedProgress(on_begin=lambda: ingest_pets(other, tmp_path, "y"))
    with pytest.raises(ConfigError, match="has another data set 'pets'"):
        transfer(repository, other, ["net"], with_data=True, progress=progress)
    assert (other.versions("datasets", "pets").head(), other.names("models")) == (1, [])


def test_a_data_set_of_one_history_goes_on_after_both_sides_were_appended_to(repository, other, tmp_path):
    for number in (1, 2):
        ingest_pets(repository, tmp_path, f"x{number}")
        save(repository, "net", state(number), step=number, data=[use_of(repository, f"pets@{number}")])
        if number == 1:
            transfer(repository, other, ["net"], with_data=True)
            ingest_pets(other, tmp_path, "y")
    report = transfer(repository, other, ["net"], with_data=True)
    assert told(report) == [("pets@2", "pets@3", True), ("net@2", "net@2", True)]


def test_data_sets_are_renamed_by_names_that_are_there_and_each_to_its_own(repository, other, tmp_path):
    for name in ("cats", "dogs"):
        ingest_pets(repository, tmp_path, name, name)
    tables = [use_of(repository, f"{name}@1") for name in ("cats", "dogs")]
    save(repository, "net", state(0), step=0, data=[DataUse("cats@1, dogs@1", "mixture", tables[0].state)])
    for names, match in (
        ({"cats": "x", "dogs": "x"}, "two data sets would get the name 'x'"),
        ({"cats": "dogs"}, "two data sets would get the name 'dogs'"),
        ({"birds": "x"}, "'birds': it is not copied; the data sets to copy are: cats, dogs"),
        ({"cats": "../x"}, "is not a valid name of a data set"),
    ):
        with pytest.raises(ConfigError, match=match):
            transfer(repository, other, ["net"], with_data=True, data_names=names)
    assert other.names("datasets") == []
    transfer(repository, other, ["net"], with_data=True, data_names={"cats": "dogs", "dogs": "cats"})
    assert other.entry(other.resolve("models", "net")).content["data"][0]["dataset"] == "dogs@1, cats@1"


def test_a_table_that_lies_about_sizes_costs_neither_time_nor_memory(repository, other):
    digest = repository.objects.put(b"a few bytes").digest
    with pytest.raises(CorruptDataError, match="has 11 bytes; its reference expects"):
        copying.copy_missing(repository.objects, other.objects, [ObjectInfo(digest, 1 << 60)])
    assert other.objects.size(digest) is None


@pytest.mark.parametrize("in_memory_bytes", [0, 8 << 20])
def test_a_version_whose_objects_are_bad_at_the_source_is_not_committed(
    repository, other, monkeypatch, in_memory_bytes
):
    monkeypatch.setattr(copying, "_IN_MEMORY_BYTES", in_memory_bytes)
    train(repository, versions=1)
    paths = list(repository.storage.local_path("objects").glob("*/*"))
    for number, path in enumerate(paths):
        target = Repository.create(f"{other.url}-{number}")
        content = path.read_bytes()
        flip_last_byte(path)
        with pytest.raises(CorruptDataError):
            transfer(repository, target, ["net"])
        path.unlink()
        with pytest.raises(NotFoundError):
            transfer(repository, target, ["net"])
        path.write_bytes(content)
        assert target.names("models") == []
        transfer(repository, target, ["net"])
        assert equal_state(repository, target, "net", "net")


def test_interrupted_anywhere_nothing_is_visible_and_the_same_call_goes_on(repository, other, monkeypatch):
    train(repository, versions=2)
    whole = transfer(repository, Repository.create(f"{other.url}-whole"), ["net@1", "net@2"]).num_objects
    write, create = Objects.write, type(other.storage).create
    left = 0

    def step():
        nonlocal left
        left -= 1
        if left < 0:
            raise UnavailableError("pulled the plug")

    monkeypatch.setattr(Objects, "write", lambda self, *args: (step(), write(self, *args)))
    monkeypatch.setattr(type(other.storage), "create", lambda self, *args: (step(), create(self, *args)))
    for steps in range(whole + 3):
        target = Repository(type(other.storage)(f"{other.url}-{steps}"))
        left = steps
        with pytest.raises(UnavailableError):
            transfer(repository, target, ["net@1", "net@2"])
        for number in target.versions("models", "net").numbers():
            assert equal_state(repository, target, f"net@{number}", f"net@{number}")
        before = len(objects(target)) if target.storage.local_path("objects").is_dir() else 0
        left = 1000
        assert transfer(repository, target, ["net@1", "net@2"]).num_objects == whole - before
        assert target.versions("models", "net").numbers() == [1, 2]


def test_two_that_push_the_same_version_at_once_make_it_once(repository, other):
    train(repository, versions=2)

    def push(_number):
        return told(transfer(Repository.open(repository.url), Repository.open(other.url), ["net@1", "net@2"]))

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(push, range(4)))
    assert other.versions("models", "net").numbers() == [1, 2]
    assert [sum(each[number][2] for each in done) for number in (0, 1)] == [1, 1]


def test_a_version_that_was_removed_there_can_be_had_again(repository, other):
    train(repository, versions=2)
    transfer(repository, other, ["net@1", "net@2"])
    remove(other, ["net@1"])
    assert told(transfer(repository, other, ["net@1"])) == [("net@1", "net@3", True)]
    remove(repository, ["net@1"])
    with pytest.raises(NotFoundError, match="removed"):
        transfer(repository, other, ["net@1"])


def test_a_version_that_nobody_trusted_signed_does_not_move(repository, other, tmp_path):
    pytest.importorskip("cryptography")
    key, stranger = (make_key(tmp_path / name).source for name in ("key", "stranger"))
    train(repository, versions=1)
    sign(repository, "net@1", load_private_key(tmp_path / "key"))
    with pytest.raises(CorruptDataError, match="sign"):
        transfer(repository, other, ["net"], trusted_keys=[stranger])
    assert other.names("models") == []
    assert told(transfer(repository, other, ["net"], trusted_keys=[key])) == [("net@1", "net@1", True)]


def test_the_facade_imports_exports_loads_and_moves(repository, other, tmp_path):
    net, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    torch.save(net.state_dict(), tmp_path / "net.pth")
    here = datasvc.open(repository.url)
    here.models.import_(str(tmp_path / "net.pth"), "net")
    here.models.export("net", str(tmp_path / "out"), "torch")
    assert told(here.models.push(other.url, ["net"])) == [("net@1", "net@1", True)]
    there = datasvc.open(other.url)
    assert told(there.models.pull(repository.url, ["net"])) == [("net@1", "net@1", False)]
    assert there.models.load_into(fresh, "net").is_exact
    assert torch.equal(fresh.weight, net.weight)
    assert list(there.models.restore("net", only=["model"], rename={"model": ""}).state) == ["bias", "weight"]


def test_gc_leaves_alone_what_was_moved(repository, other):
    train(repository)
    transfer(repository, other, ["net"])
    gc_at(other, 2**33, grace_s=0, dry_run=False)
    assert equal_state(repository, other, "net", "net@1")


def test_what_the_target_names_is_not_sent_again_however_old_it_is(repository, monkeypatch):
    other = Repository.create(f"memory://{secrets.token_hex(8)}")
    train(repository, versions=1)
    transfer(repository, other, ["net"])
    save(repository, "net", {**state(0), "step": 9}, step=9, code=NO_CODE)
    save(repository, "far", {**state(0), "step": 9}, step=9, code=NO_CODE)
    monkeypatch.setattr(file_age, "REWRITE_S", -3600)  # everything is old
    sent = []
    write = Objects.write
    monkeypatch.setattr(
        Objects, "write", lambda self, info, content: (sent.append(info.digest), write(self, info, content))
    )
    entry = repository.entry(repository.resolve("models", "net")).content
    assert transfer(repository, other, ["net"]).num_objects == 1
    assert sent == [entry["state"]]
    # Of another model there nothing is known to be named by a version that stays: that is sent again.
    assert transfer(repository, other, ["far"]).num_objects > 1


def old(repository, folder, days):
    for path in (path for path in repository.storage.local_path(folder).rglob("*") if path.is_file()):
        os.utime(path, times=(time.time() - days * 86400,) * 2)


def test_gc_between_copy_and_commit_takes_nothing_however_long_the_copy_took(repository, other, monkeypatch):
    train(repository, versions=2)
    commit = TargetLogs.commit

    def late(self, version):
        old(other, "objects", 9)
        assert not gc(other, dry_run=False).objects
        return commit(self, version)

    monkeypatch.setattr(TargetLogs, "commit", late)
    transfer(repository, other, ["net@1", "net@2"])
    assert equal_state(repository, other, "net@1", "net@1")
    assert equal_state(repository, other, "net@2", "net@2")
    assert other.storage.list("journal") == []


def test_an_intent_is_renewed_and_expires_after_a_failure(repository, other, monkeypatch):
    monkeypatch.setattr(copying, "_RENEW_INTERVAL_S", 0)
    info = other.objects.put(b"a chunk")
    with pytest.raises(UnavailableError), declare_intent(other, {Resolved("models", "net", 1): [info]}) as keep:
        old(other, "", 9)
        keep()
        assert not gc(other, dry_run=False).objects
        raise UnavailableError("pulled the plug")
    old(other, "", 9)
    assert gc(other, dry_run=False).objects == (info,)


def test_what_was_checked_is_what_moves(repository, other, tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    key = make_key(tmp_path / "key").source
    train(repository, versions=1)
    sign(repository, "net@1", load_private_key(tmp_path / "key"))
    path = repository.storage.local_path("models/net/versions/00000001.json")
    signed = repository.entry(repository.resolve("models", "net")).content

    def check_and_tamper(*arguments):
        check_signed(*arguments)
        path.write_bytes(encode_entry({**signed, "message": "not signed"}))

    monkeypatch.setattr(sys.modules[transfer.__module__], "check_signed", check_and_tamper)
    transfer(repository, other, ["net"], trusted_keys=[key])
    assert other.entry(other.resolve("models", "net")).content["message"] == ""
    # And changed before: what is checked is what was read, once.
    path.write_bytes(encode_entry({**signed, "message": "not signed"}))
    reads = []
    read = Log.read

    def read_other_content_first(self, number):
        reads.append(self.path)
        if len(reads) == 2:
            path.write_bytes(encode_entry(signed))
        return read(self, number)

    monkeypatch.setattr(Log, "read", read_other_content_first)
    with pytest.raises(CorruptDataError, match="sign"):
        transfer(repository, Repository.create(f"{other.url}-2"), ["net"], trusted_keys=[key])


def test_the_log_of_the_target_is_listed_once(repository, other, monkeypatch):
    train(repository, versions=5)
    transfer(repository, other, ["net"], with_parents=True)
    listed = []
    numbers = Log.numbers
    monkeypatch.setattr(
        Log, "numbers", lambda self: (listed.append((self._storage.url, self.path)), numbers(self))[1]
    )
    transfer(repository, other, ["net"], with_parents=True)
    assert listed.count((other.url, "models/net/versions")) == 1
