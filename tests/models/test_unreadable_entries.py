"""A version that cannot be read hides no other version: it is left out with a line, or named in our own error."""

import json
import os
import time
import warnings
from pathlib import Path

import pytest
import torch

from datasvc.api.gc import gc
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError, UnreadableVersionWarning
from datasvc.models import describe_model, find_consumers, list_models, model_log, read_lineage, restore, save
from datasvc.models.registry.diff import diff
from datasvc.models.registry.graph import read_history
from datasvc.models.registry.registry import describe_versions
from datasvc.models.registry.retention import RetentionPolicy, remove, retain
from datasvc.models.registry.verify import every_version, lost_versions, verify
from datasvc.models.saving.manager import CheckpointManager
from datasvc.models.search import find_versions, query_versions
from datasvc.models.transfer import transfer
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.log import encode_entry
from datasvc.repository.removal import mark_lost
from tests.models.every_kind import flip

DAY = 24 * 3600


def entry_file(repository, name, number, log="versions"):
    return repository.storage.local_path(f"models/{name}/{log}/{number:08d}.json")


def damage(path):
    flip(path, path.stat().st_size // 2)


def make_old(repository):
    for path in Path(repository.url).rglob("*"):
        os.utime(path, (time.time() - 8 * DAY,) * 2)


def numbers(versions):
    return [(version.name, version.version) for version in versions]


@pytest.fixture
def models(repository):
    """Three versions of `cnn`, of which the second is damaged, and one of `gpt` that continues the third."""
    for step in range(3):
        state = {"w": torch.full((4000,), float(step))}
        save(repository, "cnn", state, step=step, metrics={"top1": step / 2}, parent=f"cnn@{step}" if step else None)
    save(repository, "gpt", {"w": torch.ones(3)}, step=9, parent="cnn@3")
    damage(entry_file(repository, "cnn", 2))
    return repository


def test_lists_and_queries_have_all_other_versions_and_one_warning_about_the_damaged_one(models):
    uses = {
        "log": (lambda: numbers(model_log(models, "cnn")), [("cnn", 1), ("cnn", 3)]),
        "find": (lambda: numbers(find_versions(models, "step >= 0")), [("cnn", 3), ("cnn", 1), ("gpt", 1)]),
        "sql": (lambda: query_versions(models, "select * from versions").num_rows, 3),
        "describe": (
            lambda: numbers(describe_versions(models, [Resolved("models", "cnn", n) for n in (2, 1)])),
            [("cnn", 1)],
        ),
        "history": (
            lambda: [line.version.version for line in read_history(models, "cnn") if line.version],
            [3, 1],
        ),
        "retain": (lambda: retain(models, "cnn", RetentionPolicy(last=1))[1].removed, ()),
    }
    for name, (use, expected) in uses.items():
        with pytest.warns(UnreadableVersionWarning, match=r"cnn@2 is left out.*mark-lost cnn@2") as caught:
            assert use() == expected, name
        assert {warning.message.version for warning in caught} == {"cnn@2"}, name


def test_a_model_whose_newest_version_is_damaged_does_not_hide_the_others(models):
    damage(entry_file(models, "cnn", 3))
    with pytest.warns(UnreadableVersionWarning, match=r"cnn@3"):
        assert numbers(list_models(models)) == [("gpt", 1)]


def test_the_damaged_version_itself_is_refused_by_name(models):
    for use in (
        lambda: restore(models, "cnn@2"),
        lambda: describe_model(models, "cnn@2"),
        lambda: diff(models, "cnn@1", "cnn@2"),
        lambda: read_lineage(models, "cnn@2"),
    ):
        with pytest.raises(CorruptDataError, match=r"the entry of cnn@2 cannot be read.*another copy.*mark-lost"):
            use()
    assert restore(models, "cnn@3").state["w"][0] == 2
    (problem,) = verify(models, every_version(models)).problems
    assert problem.hit == {"cnn@2": ()}


def test_a_damaged_ancestor_is_a_gap_of_the_lineage(models):
    lineage = read_lineage(models, "gpt@1")
    assert list(lineage.models) == ["gpt@1", "cnn@3", "cnn@2"]
    assert "cnn@2 cannot be read" in lineage.models["cnn@2"].gaps[0]
    report = find_consumers(models, keys=["a"])
    assert "cnn@2 cannot be read" in str(report)


def test_a_child_of_a_damaged_version_can_be_pushed(models, tmp_path):
    target = Repository.create(str(tmp_path / "target"))
    assert transfer(models, target, ["cnn@3"]).versions[0].is_new
    assert not transfer(models, target, ["cnn@3"]).versions[0].is_new
    damage(entry_file(target, "cnn", 1))
    with pytest.warns(UnreadableVersionWarning):
        assert transfer(models, target, ["cnn@1"]).versions[0].is_new


def test_the_index_warns_of_an_indexed_version_until_it_can_be_read_again(models):
    for step in range(3, 40):
        save(models, "cnn", {"w": torch.full((8,), float(step))}, step=step)
    path = entry_file(models, "cnn", 2)
    broken = path.read_bytes()
    for _ in range(2):  # the first builds the index, the second reads it
        with pytest.warns(UnreadableVersionWarning, match="cnn@2"):
            assert len(find_versions(models, "model = 'cnn'")) == 39
    flip(path, path.stat().st_size // 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(find_versions(models, "model = 'cnn'")) == 40
    path.write_bytes(broken)
    damage(entry_file(models, "cnn", 40))  # the head of the index
    with pytest.warns(UnreadableVersionWarning) as caught:
        assert len(find_versions(models, "model = 'cnn'")) == 38
    assert {warning.message.version for warning in caught} == {"cnn@2", "cnn@40"}


def test_the_index_warns_of_a_version_with_a_wrong_field_until_it_is_restored(models):
    for step in range(3, 40):
        save(models, "gpt", {"w": torch.full((8,), float(step))}, step=step)
    mark_lost(models, "models", ["cnn@2"])
    path = entry_file(models, "gpt", 2)
    whole, content = path.read_bytes(), dict(models.versions("models", "gpt").read(2).content)
    path.write_bytes(encode_entry({**content, "step": "many"}))
    for _ in range(2):  # the first builds the index, the second reads it
        with pytest.warns(UnreadableVersionWarning, match="gpt@2 .*'many'.*queries do not see these") as caught:
            assert len(find_versions(models, "model = 'gpt'")) == 38
        assert len(caught) == 1
    path.write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(find_versions(models, "model = 'gpt' and step >= 0")) == 38


def test_gc_deletes_nothing_until_the_damaged_version_is_declared_lost_and_its_grace_has_passed(models):
    own = {file.path for file in models.storage.walk("objects")}
    damage(entry_file(models, "gpt", 1))
    remove(models, ["cnn@1"])
    make_old(models)
    with pytest.raises(CorruptDataError, match=r"cnn@2.*mark-lost cnn@2.*gpt@1.*Nothing was deleted"):
        gc(models, dry_run=False)
    mark_lost(models, "models", ["cnn@2", "gpt@1"], message="no backup")
    with pytest.raises(CorruptDataError, match=r"cnn@2 was declared lost.*gpt@1 was declared lost"):
        gc(models, dry_run=False)
    assert {file.path for file in models.storage.walk("objects")} == own
    make_old(models)
    assert gc(models, dry_run=False).objects
    assert restore(models, "cnn@3").state["w"][0] == 2


def test_a_version_that_was_declared_lost_is_named_as_such_and_hides_nothing(models):
    report = mark_lost(models, "models", ["cnn@2"], message="disk broke")
    assert list(map(str, report.versions)) == ["cnn@2"]
    assert list(map(str, lost_versions(models))) == ["cnn@2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers(model_log(models, "cnn")) == [("cnn", 1), ("cnn", 3)]
        assert len(find_versions(models, "true")) == 3
        assert verify(models, every_version(models)).problems == ()
    with pytest.raises(NotFoundError, match=r"cnn@2 was declared lost on .*disk broke.*still has 1, 3"):
        restore(models, "cnn@2")
    # A later removal does not forget it.
    remove(models, ["cnn@1"])
    assert list(map(str, lost_versions(models))) == ["cnn@2"]
    assert save(models, "cnn", {"w": torch.ones(3)}, step=4).version == 4


def test_only_a_version_without_a_readable_entry_and_without_a_tag_is_declared_lost(models):
    with pytest.raises(ConfigError, match="is intact"):
        mark_lost(models, "models", ["cnn@2", "cnn@3"])
    with pytest.raises(ConfigError, match="names no version"):
        mark_lost(models, "models", ["cnn"])
    models.tag("models", "cnn@2", "prod")
    with pytest.raises(ConfigError, match=r"cnn@2 is cnn@prod.*force"):
        mark_lost(models, "models", ["cnn@prod"])
    assert not lost_versions(models)
    assert mark_lost(models, "models", ["cnn@prod"], force=True).untagged == ("cnn@prod",)
    assert models.tags("models", "cnn") == {}


def test_a_removed_version_can_be_declared_lost(models):
    remove(models, ["cnn@2"])
    make_old(models)
    with pytest.raises(CorruptDataError, match="cnn@2"):
        gc(models)
    mark_lost(models, "models", ["cnn@2"])
    make_old(models)
    gc(models)


def test_a_damaged_tag_hides_no_version_and_can_be_set_again(models):
    models.tag("models", "cnn@1", "best")
    models.tag("models", "cnn@3", "prod")
    damage(entry_file(models, "cnn", 1, "tags/prod"))
    with pytest.warns(UnreadableVersionWarning, match="cnn@prod is left out"):
        assert models.tags("models", "cnn") == {"best": 1}
    with pytest.warns(UnreadableVersionWarning, match="cnn@prod is left out"):
        assert numbers(list_models(models)) == [("cnn", 3), ("gpt", 1)]
    # It may be the tag of any version, so none is removed.
    with pytest.raises(CorruptDataError, match=r"datasvc models tag cnn@VERSION prod"):
        remove(models, ["cnn@3"])
    with pytest.raises(CorruptDataError):
        models.tag("models", "cnn@3", "prod", expect=3)
    models.tag("models", "cnn@3", "prod")
    assert models.tags("models", "cnn") == {"best": 1, "prod": 3}


def test_a_damaged_removal_hides_no_version_and_the_next_one_replaces_it(models):
    mark_lost(models, "models", ["cnn@2"])
    remove(models, ["cnn@1"])
    damage(entry_file(models, "cnn", 2, "removals"))
    with pytest.warns(UnreadableVersionWarning, match="the newest removal of versions of cnn"):
        assert models.living("models", "cnn") == [1, 3]
    with pytest.warns(UnreadableVersionWarning):
        remove(models, ["cnn@1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert models.living("models", "cnn") == [3]


ODD = [None, True, 7, -1, 1e300, 10**400, "odd", "", [], ["odd"], [None], {}, {"a": "odd"}, [{"dataset": 3}], [[[]]]]


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def fields_of(content):
    return [*(field for field in sorted(content) if field not in {"format", "checksum"}), "merged", "sharding",
            "history", "origin", "duration", "imported"]  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("plain")))
    data = []
    for step in range(3):
        save(repository, "cnn", {"w": torch.full((8,), float(step))}, step=step, data=data, metrics={"top1": 0.5})
    return repository


def calls(repository, tmp_path):
    ref = "cnn@2"
    target = Repository.create(str(tmp_path / "target"))
    return {
        "ls": lambda: list_models(repository),
        "log": lambda: model_log(repository, "cnn"),
        "history": lambda: read_history(repository, "cnn"),
        "describe": lambda: describe_model(repository, ref),
        "describe_versions": lambda: describe_versions(repository, [Resolved("models", "cnn", 2)]),
        "find": lambda: find_versions(repository, "step >= 0"),
        "sql": lambda: query_versions(repository, "select * from all_versions"),
        "diff": lambda: diff(repository, "cnn@1", ref),
        "lineage": lambda: json.dumps(read_lineage(repository, ref).to_dict()),
        "lineage of a child": lambda: json.dumps(read_lineage(repository, "cnn@3").to_dict()),
        "trained_on": lambda: str(find_consumers(repository, keys=["a"])),
        "verify": lambda: verify(repository, [ref], deep=True),
        "restore": lambda: restore(repository, ref),
        "gc": lambda: gc(repository),
        "retain": lambda: retain(repository, "cnn", RetentionPolicy(every_steps=2)),
        "push": lambda: transfer(repository, target, ["cnn@2", "cnn@3"]),
        "push with parents": lambda: transfer(repository, target, ["cnn@3"], with_parents=True, with_data=True),
        "newest_step": lambda: CheckpointManager(repository, "cnn").newest_step(),
    }


def refusal_of(call):
    """Return the message of our error that a call raises, or None."""
    try:
        call()
    except DatasvcError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::datasvc.errors.UnreadableVersionWarning")
@pytest.mark.parametrize("call", [
    "ls", "log", "history", "describe", "describe_versions", pytest.param("find", marks=pytest.mark.slow),
    pytest.param("sql", marks=pytest.mark.slow), "diff", "lineage", "lineage of a child", "trained_on", "verify",
    "restore", "gc", "retain", "push", "push with parents", "newest_step"])  # fmt: skip
def test_an_entry_with_a_field_of_an_odd_type_raises_only_our_errors(plain, tmp_path, call):
    path = entry_file(plain, "cnn", 2)
    kept = path.read_bytes()
    content = dict(plain.versions("models", "cnn").read(2).content)
    num_done = 0
    try:
        for field in fields_of(content):
            for value in (*ODD, nested(200)):
                path.write_bytes(encode_entry({**content, field: value}))
                (tmp_path / f"{field}").mkdir(exist_ok=True)
                refusal = refusal_of(calls(plain, tmp_path / field)[call])
                assert refusal is None or "cnn@2" in refusal, (field, value, refusal)
                num_done += refusal is None
            without = {name: other for name, other in content.items() if name != field}
            path.write_bytes(encode_entry(without))
            refusal = refusal_of(calls(plain, tmp_path / field)[call])
            assert refusal is None or "cnn@2" in refusal, (field, refusal)
    finally:
        path.write_bytes(kept)
        Path(plain.url, "models/.index").unlink(missing_ok=True)
    assert num_done
