import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from datasvc.errors import UnavailableError
from datasvc.models import describe_model, restore, save
from datasvc.models.dcp import DcpWriter
from datasvc.models.registry.verify import every_version, repair, verify
from datasvc.models.tensors.tensor_table import encode_table
from datasvc.models.versions.signing import load_private_key, make_key, sign
from datasvc.repository import Repository, Resolved
from datasvc.repository.objects.objects import digest_of
from tests.models.every_kind import copy_of, equal, flip, links_of, records_of, save_every_kind, state_of
from tests.progress import RecordedProgress

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

V1, V2 = Resolved("models", "m", 1), Resolved("models", "m", 2)


@pytest.fixture
def twice(repository):
    save_every_kind(repository)
    return repository


def object_files(repository):
    return {path.name: path for path in Path(repository.url, "objects").rglob("*") if path.is_file()}


def test_whole_versions_verify_and_every_object_is_read_once(twice):
    progress = RecordedProgress()
    done = verify(twice, [V1, V2], deep=True, progress=progress)
    assert done.problems == ()
    assert done.versions == ("m@1", "m@2")
    tensors = {link.object: link.object_bytes for ref in ("m@1", "m@2") for link in links_of(twice, ref)}
    decoded = sum(record.nbytes for ref in ("m@1", "m@2") for record in records_of(twice, ref))
    assert progress.totals == [sum(tensors.values()) + decoded] == [progress.total]
    documents = {describe_model(twice, ref).entry[role] for ref in ("m@1", "m@2") for role in ("tensors", "state")}
    assert documents | set(tensors) <= set(object_files(twice))
    assert done.num_objects >= len(documents) + len(tensors)


def test_every_bad_object_is_found_with_the_tensors_and_versions_that_it_hits(twice):
    for digest in {link.object for link in links_of(twice, "m@2")}:
        path = object_files(twice)[digest]
        (link, *_) = [link for link in links_of(twice, "m@2") if link.object == digest]
        whole = flip(path, link.offset)
        (problem,) = verify(twice, [V1, V2]).problems
        assert (problem.kind, problem.role, problem.digest) == ("changed", "tensors", digest)
        for version in ("m@1", "m@2"):
            hit = {
                record.name
                for record in records_of(twice, version)
                for chunk in record.chunks
                for each in chunk.chain
                if each.object == digest and each.offset <= link.offset < each.offset + each.length
            }
            assert set(problem.hit.get(version, ())) == hit
        path.write_bytes(whole)


def test_a_bad_table_state_or_entry_and_a_missing_object_are_found_together(twice):
    entry = describe_model(twice, "m@2").entry
    flip(object_files(twice)[entry["state"]], 20)
    (record,) = [record for record in records_of(twice, "m@2") if record.name == "model.frozen"]
    frozen = record.chunks[0].chain[0]
    object_files(twice)[frozen.object].unlink()
    flip(twice.storage.local_path("models/m/versions/00000001.json"), 30)
    found = {(each.role, each.kind): each for each in verify(twice, [V1, V2]).problems}
    assert set(found) == {("entry", "changed"), ("state", "changed"), ("tensors", "missing")}
    assert found["tensors", "missing"].hit == {"m@2": ("model.frozen",)}
    assert found["entry", "changed"].hit == {"m@1": ()}
    assert "'model.frozen'" in str(found["tensors", "missing"])
    flip(object_files(twice)[entry["tensors"]], 50)
    found = {(each.role, each.kind): each for each in verify(twice, [V2]).problems}
    assert set(found) == {("tensor table", "changed"), ("state", "changed")}


def test_what_cannot_be_read_is_one_problem_among_others_and_is_repaired(twice, tmp_path):
    copy = copy_of(twice, tmp_path / "copy")
    entry = describe_model(twice, "m@2").entry
    unreadable = {entry["state"], links_of(twice, "m@2")[0].object}
    for digest in unreadable:
        # The kernel opens it and then refuses to read, as it does where a disk fails.
        object_files(twice)[digest].unlink()
        twice.objects.local_path(digest).mkdir()
    (other,) = [link.object for link in links_of(twice, "m@2") if link.length == 90_000]
    flip(object_files(twice)[other], 7)
    problems = verify(twice, [V2], deep=True).problems
    assert {each.digest: each.kind for each in problems} == {
        **dict.fromkeys(unreadable, "unreadable"),
        other: "changed",
    }
    assert all(each.hit for each in problems)
    repairs = repair(twice, problems, [copy])
    assert [each.failure for each in repairs] == [None] * 3
    assert verify(twice, [V1, V2], deep=True).problems == ()


def test_an_entry_that_cannot_be_read_hides_no_other_problem(twice, monkeypatch):
    entry = Repository.entry

    def unreadable(self, version):
        if version == V1:
            raise UnavailableError("the disk cannot be read")
        return entry(self, version)

    monkeypatch.setattr(Repository, "entry", unreadable)
    (problem,) = verify(twice, [V1, V2]).problems
    assert (problem.role, problem.kind, problem.hit) == ("entry", "unreadable", {"m@1": ()})


def test_a_version_that_is_removed_meanwhile_is_no_problem(twice):
    save(twice, "m", {"w": torch.randn(30_000)}, step=3)
    last = describe_model(twice, "m@3")
    objects = [link.object for link in links_of(twice, "m@3")]

    def remove():
        twice.removals("models", "m").add([3])
        for digest in (*objects, last.tensors):
            object_files(twice)[digest].unlink()

    flip(object_files(twice)[last.entry["state"]], 20)
    progress = RecordedProgress(on_begin=remove)
    assert verify(twice, [V1, V2, Resolved("models", "m", 3)], deep=True, progress=progress).problems == ()


def test_a_sharding_and_the_code_of_a_version_are_read_too(twice):
    dcp.save({"w": torch.ones(4, 2), "step": 1}, storage_writer=DcpWriter(twice.url, name="s"))
    version = Resolved("models", "s", 1)
    entry = describe_model(twice, "s").entry
    whole = {role: twice.objects.read(digest) for role, digest in named(entry).items()}
    for role, digest in named(entry).items():
        flip(object_files(twice)[digest], 9)
        (problem,) = verify(twice, [version]).problems
        assert (problem.role, problem.kind, problem.hit) == (role, "changed", {"s@1": ()})
        object_files(twice)[digest].write_bytes(whole[role])
    wrong = json.loads(whole["sharding"])
    wrong["tensors"]["w"]["chunks"] = []
    digest = twice.objects.put(json.dumps(wrong).encode()).digest
    twice.versions("models", "s").append(lambda _head: {**entry, "sharding": digest})
    (problem,) = verify(twice, [Resolved("models", "s", 2)]).problems
    assert (problem.role, problem.kind) == ("sharding", "contradictory")


def named(entry):
    roles = {"sharding": entry["sharding"]}
    return roles | ({"code": entry["code"]["diff"]} if entry["code"].get("diff") else {})


def commit_table(repository, records, **changes):
    """Commit a version with the entry of m@2 but another table, as a bug or somebody hostile may."""
    entry = {**describe_model(repository, "m@2").entry, **changes}
    table = repository.objects.put(encode_table(records)).digest
    committed = repository.versions("models", "m").append(lambda _head: {**entry, "tensors": table})
    return Resolved("models", "m", committed.number)


def test_what_was_written_wrong_is_found_when_tensors_are_decoded(twice):
    first, *rest = records_of(twice, "m@2")
    wrong = dataclasses.replace(first.chunks[0], digest=digest_of(b"something else"))
    version = commit_table(twice, [dataclasses.replace(first, chunks=(wrong, *first.chunks[1:])), *rest])
    assert verify(twice, [version]).problems == ()
    (problem,) = verify(twice, [version], deep=True).problems
    assert (problem.kind, problem.hit) == ("contradictory", {str(version): (first.name,)})


def test_a_state_that_names_tensors_which_are_not_there_is_found(twice):
    version = commit_table(twice, records_of(twice, "m@2")[1:])
    (problem,) = verify(twice, [version]).problems
    assert (problem.role, problem.kind) == ("state", "contradictory")


def test_all_versions_are_those_that_were_not_removed(twice):
    save(twice, "other", {"w": torch.zeros(2)}, step=0)
    assert list(map(str, every_version(twice))) == ["m@1", "m@2", "other@1"]
    assert list(map(str, every_version(twice, ["other"]))) == ["other@1"]
    twice.removals("models", "m").add([1])
    assert list(map(str, every_version(twice, ["m"]))) == ["m@2"]


def test_versions_are_given_by_references_too(twice):
    twice.tag("models", "m@1", "prod")
    assert verify(twice, "m@prod").versions == ("m@1",)
    assert verify(twice, ["m@prod", V2, "m@1"]).versions == ("m@1", "m@2")


def test_an_unsigned_version_is_a_problem_where_keys_are_trusted(twice, tmp_path):
    key = make_key(tmp_path / "key")
    sign(twice, "m@2", load_private_key(tmp_path / "key"))
    (problem,) = verify(twice, [V1, V2], trusted_keys=[key.source]).problems
    assert (problem.kind, problem.hit) == ("not trusted", {"m@1": ()})


def test_repair_brings_good_copies_and_keeps_the_bad_ones(twice, tmp_path):
    copy = copy_of(twice, tmp_path / "copy")
    named = {link.object for link in links_of(twice, "m@2")} | {describe_model(twice, "m@2").entry["state"]}
    gone, *changed = sorted(named)
    files = object_files(twice)
    files[gone].unlink()
    bad = {}
    for digest in changed:
        flip(files[digest], 5)
        bad[digest] = files[digest].read_bytes()
    repairs = {each.digest: each for each in repair(twice, verify(twice, [V2]).problems, [copy])}
    assert set(repairs) == named
    assert all(each.failure is None for each in repairs.values())
    assert repairs[gone].kept_at is None
    for digest, content in bad.items():
        kept = Path(repairs[digest].kept_at)
        assert kept.parent == Path(twice.url, "quarantine")
        assert kept.read_bytes() == content
    assert verify(twice, [V1, V2], deep=True).problems == ()
    assert equal(restore(twice, "m").state, state_of(1))


def test_what_no_copy_has_whole_stays_as_it_is_and_is_said(twice, tmp_path):
    copy = copy_of(twice, tmp_path / "copy")
    digest = links_of(twice, "m@2")[0].object
    for each in (twice, copy):
        flip(object_files(each)[digest], 5)
    before = object_files(twice)[digest].read_bytes()
    (done,) = repair(twice, verify(twice, [V2]).problems, [copy])
    assert "is corrupt" in done.failure
    assert object_files(twice)[digest].read_bytes() == before
    assert not Path(twice.url, "quarantine").exists()
    object_files(copy)[digest].unlink()
    (done,) = repair(twice, verify(twice, [V2]).problems, [copy])
    assert "is missing as well" in done.failure


def test_a_remote_repository_is_repaired_and_keeps_the_bad_bytes(s3_bucket, repository):
    remote = Repository.create(f"{s3_bucket}/repair")
    for each in (remote, repository):
        save(each, "m", {"w": torch.arange(30_000.0)}, step=0)
    (link,) = links_of(repository, "m@1")
    content = repository.objects.read(link.object)
    bad = content[:9] + b"?" + content[10:]
    remote.storage.put_bytes(remote.objects.path(link.object), bad)
    (done,) = repair(remote, verify(remote, [V1]).problems, [repository])
    assert remote.objects.read(link.object) == content
    kept = done.kept_at.removeprefix(remote.storage.location("")).lstrip("/")
    assert remote.storage.read(kept) == bad
