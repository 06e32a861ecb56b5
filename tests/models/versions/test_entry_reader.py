"""How little is read to follow an ancestry: each log is listed once, each entry read once."""

from collections import Counter

import pytest

from datasvc.models.registry.ancestry import read_ancestry
from datasvc.models.registry.registry import list_models, model_ancestry
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Repository
from datasvc.repository.store.storage import Storage
from tests.models.entries import commit_entry


@pytest.fixture
def lists(monkeypatch):
    """How often each folder is listed, of a base model of 100 versions and a fine-tuned one on its 80th."""
    counted, own = Counter(), Storage.list
    monkeypatch.setattr(Storage, "list", lambda self, path: counted.update([path]) or own(self, path))
    return counted


@pytest.fixture
def tuned(repository):
    for number in range(100):
        commit_entry(repository, "base", parent=f"base@{number}" if number else None, step=number)
    repository.tag("models", "base@1", "prod")
    commit_entry(repository, "cnn", parent="base@80")
    return repository


def test_the_log_of_a_tuned_model_lists_what_it_was_made_of_once(tuned, lists):
    found = model_ancestry(tuned, "cnn")
    assert {(each.name, each.version) for each in found} == {("cnn", 1), *(("base", n + 1) for n in range(80))}
    assert [each.tags for each in found if each.version == 1 and each.name == "base"] == [("prod",)]
    assert max(lists[path] for path in lists if path.startswith("models/base/")) <= 2


def test_one_version_is_asked_for_and_no_later_entry_is_read(tuned, monkeypatch):
    asked, read = [], Repository.versions

    def versions(self, kind, name):
        log = read(self, kind, name)
        entries = log.try_entries
        log.try_entries = lambda numbers: asked.append((name, list(numbers))) or entries(asked[-1][1])
        return log

    monkeypatch.setattr(Repository, "versions", versions)
    reader = EntryReader(tuned)
    assert len(read_ancestry(tuned, ["cnn@1"], entries=reader).versions) == 81
    assert sorted(n for name, numbers in asked for n in numbers if name == "base") == list(range(1, 81))
    assert len(asked) == 4  # neighbours together
    read_ancestry(tuned, ["base@80"], entries=reader)
    assert len(asked) == 4
    newer = commit_entry(tuned, "base", parent="base@100")
    assert newer in read_ancestry(tuned, [newer], entries=reader).versions


def test_models_of_a_store_that_is_not_local_are_listed_by_name():
    repository = Repository.create("memory://listed-models")
    for number in range(20):
        commit_entry(repository, f"model-{number:02}", step=number)
    assert [(str(each), each.entry["step"]) for each in list_models(repository)] == [
        (f"model-{number:02}@1", number) for number in range(20)
    ]
