import os
import secrets
import time
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.api.gc import GRACE_S, gc, gc_at
from datasvc.errors import ConfigError, ConflictError, NotFoundError
from datasvc.models import CodeRevision, describe_model, list_models, model_log, restore, save
from datasvc.models.registry.retention import RetentionPolicy, remove, retain
from datasvc.repository import Repository
from datasvc.repository.logs.removals import Removals
from tests.models.entries import commit_entry

LATER = time.time() + GRACE_S + 3600
NO_CODE = CodeRevision(None, dirty=False)


@pytest.fixture
def trained(repository):
    """Four versions, each little different from the one before, so that they are stored as differences."""
    torch.manual_seed(0)
    weights = torch.randn(50_000)
    for step in range(4):
        weights = weights + 1e-4 * torch.randn(50_000)
        parent = f"cnn@{step}" if step else None
        save(repository, "cnn", {"w": weights, "step": step}, step=step, parent=parent, code=NO_CODE, environment={})
    return repository


def collect(repository):
    return gc_at(repository, LATER, dry_run=False)


def test_what_is_removed_is_neither_restored_nor_collected_by_later_versions(trained):
    last = restore(trained, "cnn@4").state
    size = trained.storage.local_path("objects")
    before = sum(path.stat().st_size for path in size.rglob("*") if path.is_file())
    done = remove(trained, ["cnn@2", "cnn@1"], message="diverged")
    assert [str(version) for version in done.versions] == ["cnn@1", "cnn@2"]
    collect(trained)
    with pytest.raises(NotFoundError, match=r"cnn@2 was removed on .* \(diverged\); cnn still has 3 to 4"):
        restore(trained, "cnn@2")
    assert torch.equal(restore(trained, "cnn@4").state["w"], last["w"])
    restore(trained, "cnn@3")
    # Differences to removed versions stay, as those that stay are made of them.
    assert sum(path.stat().st_size for path in size.rglob("*") if path.is_file()) < before
    remove(trained, ["cnn@3", "cnn@4"])
    collect(trained)
    assert not [path for path in size.rglob("*") if path.is_file()]
    assert gc_at(trained, LATER, dry_run=False).objects == ()


def test_the_bytes_of_a_version_stay_as_long_as_somebody_may_be_reading_it(trained):
    entry = describe_model(trained, "cnn@1").entry
    for path in Path(trained.url, "objects").rglob("*"):
        os.utime(path, (time.time() - 2 * GRACE_S,) * 2)
    remove(trained, ["cnn@1"])
    assert gc(trained, dry_run=False).objects == ()
    trained.objects.read(entry["state"])
    assert entry["state"] in {info.digest for info in collect(trained).objects}


def test_what_a_removed_version_was_made_of_can_still_be_told(repository):
    patch = repository.objects.put(b"the local changes").digest
    code = {"revision": "abc", "dirty": True, "diff": patch}
    table = repository.objects.put(b"a shard table").digest
    commit_entry(repository, "cnn", code=code, data=["pets@1"], history=[{"state": {"version": table}}])
    commit_entry(repository, "cnn")
    remove(repository, ["cnn@1"])
    collect(repository)
    found = describe_model(repository, "cnn@1")
    assert (found.removed, found.entry["data"][0]["dataset"]) == (True, "pets@1")
    assert repository.objects.read(found.entry["code"]["diff"]) == b"the local changes"
    assert repository.objects.read(table) == b"a shard table"
    assert [each.removed for each in model_log(repository, "cnn")] == [True, False]


def test_a_model_whose_versions_are_all_removed_is_listed_no_more(repository):
    commit_entry(repository, "a"), commit_entry(repository, "b"), commit_entry(repository, "b")
    remove(repository, ["a@1", "b@2"])
    assert [str(each) for each in list_models(repository)] == ["b@1"]


def test_a_tagged_version_is_removed_only_by_force_which_takes_the_tag_away(repository):
    commit_entry(repository, "cnn"), commit_entry(repository, "cnn")
    repository.tag("models", "cnn@1", "prod")
    for ref in ("cnn@1", "cnn@prod"):
        with pytest.raises(ConfigError, match=r"cnn@1 is cnn@prod; nothing was removed.*--force"):
            remove(repository, ["cnn@2", ref])
    assert repository.living("models", "cnn") == [1, 2]
    assert remove(repository, ["cnn@prod"], force=True).untagged == ("cnn@prod",)
    assert (repository.tags("models", "cnn"), repository.living("models", "cnn")) == ({}, [2])


@pytest.mark.parametrize(
    ("refs", "error", "message"),
    [
        (["cnn"], ConfigError, "'cnn' names no version; expected a version or a tag for each, such as cnn@3"),
        (["cnn@2", "cnn@7"], NotFoundError, "no version 7; it has 1 to 3"),
        (["cnn@2", "rnn@1"], NotFoundError, "no model 'rnn'"),
    ],
)
def test_what_cannot_be_removed_leaves_all_the_others(repository, refs, error, message):
    [commit_entry(repository, "cnn") for _ in range(3)]
    with pytest.raises(error, match=message):
        remove(repository, refs)
    assert repository.living("models", "cnn") == [1, 2, 3]


def test_a_tag_that_comes_while_its_version_is_removed_gives_the_version_back(repository, monkeypatch):
    [commit_entry(repository, "cnn") for _ in range(3)]
    add = Removals.add

    def tagged_just_before(self, versions, message=""):
        # Another process: it resolved before the removal, and moves its tag after the look at the tags.
        Repository.open(repository.url).tag("models", "cnn@2", "prod")
        return add(self, versions, message)

    monkeypatch.setattr(Removals, "add", tagged_just_before)
    with pytest.raises(ConflictError, match=r"\{'prod': 2\} stay, the other versions are removed"):
        remove(repository, ["cnn@1", "cnn@2"])
    assert (repository.living("models", "cnn"), repository.tags("models", "cnn")) == ([2, 3], {"prod": 2})


def test_a_forced_removal_that_fails_puts_tags_back_and_says_what_is_removed(repository, monkeypatch):
    for name in ("a", "cnn", "z"):
        commit_entry(repository, name), commit_entry(repository, name)
        repository.tag("models", f"{name}@1", "beta"), repository.tag("models", f"{name}@1", "prod")
    untag = Repository.untag

    def moved_just_before(self, kind, name, tag, **options):
        if (name, tag) == ("cnn", "prod"):
            self.tag("models", "cnn@2", "prod")
        untag(self, kind, name, tag, **options)

    monkeypatch.setattr(Repository, "untag", moved_just_before)
    with pytest.raises(ConflictError) as caught:
        remove(repository, ["a@1", "cnn@1", "z@1"], force=True)
    assert str(caught.value) == (
        "another process moved cnn@prod: check the tag; no version of cnn was removed; "
        "removed before, with their tags: a@1"
    )
    assert [repository.living("models", name) for name in ("a", "cnn", "z")] == [[2], [1, 2], [1, 2]]
    tags = [repository.tags("models", name) for name in ("a", "cnn", "z")]
    assert tags == [{}, {"beta": 1, "prod": 2}, {"beta": 1, "prod": 1}]


@pytest.mark.parametrize("before", [None, "cnn@1"])
def test_a_tag_that_comes_onto_a_version_just_removed_goes_back_to_where_it_was(repository, monkeypatch, before):
    [commit_entry(repository, "cnn") for _ in range(3)]
    if before:
        repository.tag("models", before, "prod")
    resolve = Repository._resolve

    def removed_just_after(self, kind, *arguments, **options):
        found = resolve(self, kind, *arguments, **options)
        self.removals("models", "cnn").add([found.version])
        return found

    monkeypatch.setattr(Repository, "_resolve", removed_just_after)
    with pytest.raises(ConflictError, match=r"cnn@2 was removed while tag 'prod' was moved to it"):
        repository.tag("models", "cnn@2", "prod")
    assert repository.tags("models", "cnn") == ({"prod": 1} if before else {})


def test_a_tag_never_goes_back_to_a_version_that_was_removed_meanwhile(repository, monkeypatch):
    [commit_entry(repository, "cnn") for _ in range(3)]
    repository.tag("models", "cnn@1", "prod")
    resolve = Repository._resolve

    def both_removed_just_after(self, kind, *arguments, **options):
        found = resolve(self, kind, *arguments, **options)
        self.removals("models", "cnn").add([1, 2])
        return found

    monkeypatch.setattr(Repository, "_resolve", both_removed_just_after)
    monkeypatch.setattr(Removals, "restore", lambda *_: None)
    with pytest.raises(
        ConflictError, match=r"cnn@2 was removed .* the tag was removed, because version 1, .* was removed too"
    ):
        repository.tag("models", "cnn@2", "prod")
    assert repository.tags("models", "cnn") == {}


def test_a_tag_holds_a_version_whose_removal_was_killed_before_it_looked_at_the_tags_again(repository):
    save(repository, "cnn", {"step": 1}, step=1, code=NO_CODE, environment={}), commit_entry(repository, "cnn")
    repository.tag("models", "cnn@1", "prod")
    repository.removals("models", "cnn").add([1])
    collect(repository)
    assert [restore(repository, ref).state for ref in ("cnn@prod", "cnn@1")] == [{"step": 1}] * 2
    assert not describe_model(repository, "cnn@1").removed
    repository.tag("models", "cnn@1", "beta")
    assert (repository.living("models", "cnn"), repository.tags("models", "cnn")) == ([1, 2], {"prod": 1, "beta": 1})


def test_retention_removes_nothing_until_it_is_told_to(repository):
    for number in range(6):
        commit_entry(repository, "cnn", step=number, metrics={"acc": [0.1, 0.9, 0.2, 0.3, 0.4, 0.5][number]})
    repository.tag("models", "cnn@3", "prod")
    policy = RetentionPolicy(last=2, metric="acc")
    versions, plan = retain(repository, "cnn", policy)
    assert ([each.version for each in versions], plan.removed) == ([1, 2, 3, 4, 5, 6], (1, 4))
    assert repository.living("models", "cnn") == [1, 2, 3, 4, 5, 6]
    retain(repository, "cnn", policy, dry_run=False)
    assert repository.living("models", "cnn") == [2, 3, 5, 6]
    assert repository.removals("models", "cnn").find(4).content["message"] == "retain last 2, metric acc, mode max"
    assert retain(repository, "cnn", policy, dry_run=False)[1].removed == ()
    assert not Path(repository.url, "models/cnn/removals/00000002.json").exists()


def test_a_run_whose_last_version_was_removed_and_collected_stores_everything_again():
    """What a remote repository has is not looked at chunk by chunk, so that the run must not go by its memory."""
    repo = datasvc.open(f"memory://{secrets.token_hex(8)}", create=True)
    frozen, first = torch.arange(50_000.0), torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    with repo.models.manager("m") as model:
        model.save({"frozen": frozen, "w": first}, step=1, wait=True)
        remove(repo.repository, ["m@1"])
        assert collect(repo.repository).objects
        model.save({"frozen": frozen, "w": first * (1 + 1e-6)}, step=2, wait=True)
    found = repo.models.restore("m@2").state
    assert torch.equal(found["frozen"], frozen)
    assert torch.equal(found["w"], first * (1 + 1e-6))
