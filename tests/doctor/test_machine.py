"""What the doctor says of limits, ports, folders and clocks."""

import fcntl
import os
import resource
import socket
from types import SimpleNamespace

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue.object_locks import ObjectLocks
from datasvc.doctor.machine import (
    clock_difference_s,
    examine_cache,
    examine_clock,
    examine_open_files,
    examine_ports,
    examine_repository_locks,
    examine_shared_memory,
    examine_space,
)
from datasvc.repository import Repository
from tests.doctor.findings import by_check
from tests.support.ports import reserved_ports


@pytest.mark.parametrize(
    ("hard", "level"), [(512, "problem"), (4096, "warning"), (65_536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_open_files_are_reported(hard, level, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    assert examine_open_files().level == level


def status(*, blocks, free, files=1000, free_files=1000):
    """A file system with blocks of 1 MiB."""
    return SimpleNamespace(f_frsize=1 << 20, f_blocks=blocks, f_bavail=free, f_files=files, f_favail=free_files)


@pytest.mark.parametrize(("blocks", "level"), [(64, "warning"), (2048, "ok")])
def test_a_small_shared_memory_is_a_warning(blocks, level, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda _: status(blocks=blocks, free=blocks))
    assert examine_shared_memory(tmp_path).level == level


def test_no_shared_memory_is_a_problem(tmp_path):
    assert examine_shared_memory(tmp_path / "missing").level == "problem"


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ({"blocks": 1000, "free": 500}, ["ok", "ok"]),
        ({"blocks": 1000, "free": 10}, ["warning", "ok"]),
        ({"blocks": 1000, "free": 0}, ["problem", "ok"]),
        ({"blocks": 1000, "free": 500, "free_files": 0}, ["ok", "problem"]),
        ({"blocks": 1000, "free": 500, "files": 0, "free_files": 0}, ["ok"]),
    ],
)
def test_a_full_disk_or_one_without_inodes_is_a_problem(values, levels, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda _: status(**values))
    assert [finding.level for finding in examine_space("cache", tmp_path)] == levels


def test_a_port_in_use_is_a_warning():
    with reserved_ports(1) as (port,):
        with socket.create_server(("", port)):
            (finding,) = examine_ports({port: "datasvc serve"})
        assert (finding.check, finding.level) == (f"port {port}", "warning")
        assert next(examine_ports({port: "datasvc serve"})).level == "ok"


def test_a_cache_and_one_that_does_not_exist_yet_are_in_order(tmp_path):
    Cache(tmp_path / "cache", budget="10MB").close()
    found = by_check(examine_cache(tmp_path / "cache"))
    assert [*found] == ["cache locks", "cache budget", "cache disk", "cache inodes"]
    assert {finding.level for finding in found.values()} == {"ok"}
    found = by_check(examine_cache(tmp_path / "not" / "yet"))
    assert str(tmp_path) in found["cache"].text
    assert found["cache locks"].level == "ok"
    assert sorted(os.listdir(tmp_path)) == ["cache"]


def test_a_folder_that_cannot_be_a_cache_is_a_problem(tmp_path):
    Repository.create(str(tmp_path))
    finding = by_check(examine_cache(tmp_path))["cache"]
    assert (finding.level, "is a repository" in finding.text) == ("problem", True)


def test_a_budget_above_the_size_of_the_disk_is_a_problem(tmp_path):
    Cache(tmp_path, budget="1000TB").close()
    assert by_check(examine_cache(tmp_path))["cache budget"].level == "problem"


def test_a_cache_whose_locks_do_not_exclude_each_other_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(ObjectLocks, "try_lock_exclusive", lambda *_: True)
    assert by_check(examine_cache(tmp_path))["cache locks"].level == "problem"


def test_a_file_system_without_locks_is_a_problem(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert by_check(examine_cache(tmp_path))["cache"].level == "problem"
    (tmp_path / "file").touch()
    finding = examine_repository_locks(tmp_path / "file", tmp_path)
    assert (finding.level, "No locks available" in finding.text) == ("problem", True)


def test_locks_that_two_can_hold_are_a_problem(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert examine_repository_locks(tmp_path / "file", tmp_path).level == "ok"
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert examine_repository_locks(tmp_path / "file", tmp_path).level == "problem"


def test_whole_seconds_and_a_slow_answer_are_no_difference_of_clocks():
    assert clock_difference_s(100.9, 100.0, 100.95) == 0
    assert clock_difference_s(100.0, 107.0, 110.0) == 0
    assert clock_difference_s(100.0, 170.0, 110.0) == 60
    assert clock_difference_s(100.5, 90.0, 101.0) == -9.5


@pytest.mark.parametrize(("theirs_s", "level"), [(1000, "ok"), (1030, "warning"), (970, "warning"), (0, "problem")])
def test_a_clock_that_differs_is_reported(theirs_s, level):
    assert examine_clock("clock", 1000, theirs_s, 1001).level == level
