"""Ranks that have one path and different folders, as nodes have that each save to `./repo` of their own."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from datasvc.api.gc import GRACE_S, gc_at
from datasvc.errors import ConfigError, UnavailableError
from datasvc.models import CheckpointManager
from datasvc.models.saving import shared_store
from datasvc.models.saving.shared_store import can_read_marker, check_same_store, write_marker
from datasvc.repository import Repository
from tests.models.as_ranks import Block, rows, save_as_ranks
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store


class ThreadChannel:
    """A rank in a thread of this process; `exchange` is that of real ranks."""

    def __init__(self, rank, meeting, messages):
        self.rank, self.size = rank, len(messages)
        self._meeting, self._messages = meeting, messages

    @classmethod
    def of(cls, size):
        meeting, messages = threading.Barrier(size), [None] * size
        return [cls(rank, meeting, messages) for rank in range(size)]

    def exchange(self, message):
        self._messages[self.rank] = message
        self._meeting.wait()
        answers = list(self._messages)
        self._meeting.wait()
        return answers


def check(repositories):
    """Let a rank check each repository; returns the error of each, or None."""

    def one(channel, repository):
        try:
            check_same_store(channel, repository.storage)
        except (ConfigError, UnavailableError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(repositories)) as pool:
        return list(pool.map(one, ThreadChannel.of(len(repositories)), repositories))


def files_of(repository):
    return {file.path for file in repository.storage.walk("")}


def test_ranks_that_store_to_one_place_find_the_marker_and_it_is_removed(url):  # noqa: F811
    repositories = [Repository.create(url) for _ in range(3)]
    assert check(repositories) == [None] * 3
    assert files_of(repositories[0]) == {"datasvc.json"}


def test_ranks_whose_path_is_another_folder_get_the_same_error_that_names_them(tmp_path):
    nodes = [Repository.create(str(tmp_path / f"node{node}")) for node in range(2)]
    errors = check([nodes[0], nodes[0], nodes[1], nodes[1], nodes[0], nodes[1]])
    assert {type(error) for error in errors} == {ConfigError}
    for error in errors:
        assert re.search(
            r"^rank 2 to 3, 5 \(of 6\) does not .* as rank 0, .*node0.*a folder that all nodes mount, or", str(error)
        )
    assert len(set(map(str, errors))) == 1
    assert all(files_of(node) == {"datasvc.json"} for node in nodes)


def test_a_marker_is_another_one_each_time_so_that_no_cache_knows_it(repository, monkeypatch):
    left = []
    real = shared_store.write_marker
    monkeypatch.setattr(shared_store, "write_marker", lambda storage: left.append(real(storage)) or left[-1])
    check([repository] * 2), check([repository] * 2)
    assert len({marker.path for marker in left}) == len({marker.content for marker in left}) == 2


def test_a_file_of_the_same_name_with_other_content_is_not_the_marker(repository):
    marker = write_marker(repository.storage)
    assert can_read_marker(repository.storage, marker)
    Path(repository.url, marker.path).write_bytes(b"f" * 32)
    assert not can_read_marker(repository.storage, marker)


def test_a_rank_whose_store_does_not_answer_is_an_error_on_all_and_the_marker_is_removed(tmp_path, monkeypatch):
    repositories = [Repository.create(str(tmp_path / "repo")) for _ in range(2)]

    def failing(*_arguments):
        raise UnavailableError("no answer")

    monkeypatch.setattr(repositories[1].storage, "read", failing)
    errors = check(repositories)
    assert [str(error) for error in errors] == ["rank 1: no answer"] * 2
    assert files_of(repositories[0]) == {"datasvc.json"}


def test_the_marker_of_ranks_that_died_is_no_entry_of_any_list_and_gc_removes_it(repository):
    marker = write_marker(repository.storage)
    assert repository.storage.list("") == ["datasvc.json"]
    done = gc_at(repository, time.time() + GRACE_S + 3600, dry_run=False)
    assert done.temporary_files == (marker.path,)
    assert files_of(repository) == {"datasvc.json"}


def test_a_model_that_several_ranks_open_is_refused_before_anything_is_saved(tmp_path, monkeypatch):
    nodes = [Repository.create(str(tmp_path / f"node{node}")) for node in range(2)]
    channels, closed = iter(zip(ThreadChannel.of(2), ThreadChannel.of(2), strict=True)), []
    monkeypatch.setattr("datasvc.models.saving.manager.open_channels", lambda *_: next(channels))
    monkeypatch.setattr(ThreadChannel, "close", lambda channel: closed.append(channel.rank), raising=False)

    def open_model(node):
        with pytest.raises(ConfigError, match=r"^rank 1 \(of 2\) does not store"):
            CheckpointManager(node, "cnn")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(open_model, nodes))
    assert sorted(closed) == [0, 0, 1, 1]
    assert all(node.names("models") == [] for node in nodes)


def test_a_sharded_save_whose_ranks_have_different_folders_stores_nothing_and_names_them(tmp_path):
    whole = torch.arange(400_000.0).view(4, -1)
    states = [{"w": rows(whole, rank, 3)} for rank in range(3)]
    assert isinstance(states[0]["w"], Block)
    urls = [str(tmp_path / name) for name in ("a", "b", "a")]
    with pytest.raises(ConfigError, match=r"^rank 1 \(of 3\) does not store"):
        save_as_ranks(urls, states)
    assert not [file for each in set(urls) for file in files_of(Repository.open(each)) if file.startswith("objects/")]


def test_a_sharded_save_to_one_folder_leaves_no_marker(repository):
    whole = torch.arange(400_000.0).view(4, -1)
    save_as_ranks(repository.url, [{"w": rows(whole, rank, 3)} for rank in range(3)])
    assert not [file for file in files_of(repository) if file.startswith(".tmp-")]
