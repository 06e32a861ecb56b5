"""A catalogue that cannot be trusted is made again from the files, and nothing is served before it was verified."""

import os
import shutil
import subprocess
import sys

import lmdb
import pytest

from datasvc.cache import Cache, Quota
from datasvc.cache.catalogue import recovery
from datasvc.cache.catalogue.configuration import Configuration
from datasvc.cache.catalogue.records import UNVERIFIED
from datasvc.cache.catalogue.tables import CatalogueTables
from datasvc.errors import ConfigError, CorruptDataError
from tests.cache.processes import ROOT, die_while_fetching, disk_bytes, hold_in_a_process, kill, object_path


@pytest.fixture
def filled(tmp_path, origin):
    """The folder of a cache with three objects, which nobody has open."""
    repository, infos = origin
    with Cache(tmp_path / "cache", budget=5 * 4096) as cache:
        cache.set_quota("team", Quota(4096))
        for info in infos[:3]:
            cache.acquire(info, repository)
            cache.release(info.digest)
    return tmp_path / "cache"


def truncate_to(size_bytes):
    return lambda path: os.truncate(path, size_bytes)


def overwrite(content):
    return lambda path: path.write_bytes(content * (path.stat().st_size // len(content)))


def zero_from(offset):
    def zero(path):
        with path.open("r+b") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(offset)
            file.write(bytes(size_bytes - offset))

    return zero


DAMAGE = {
    "deleted": lambda path: path.unlink(),
    "empty": truncate_to(0),
    "one page": truncate_to(4096),
    "two pages": truncate_to(8192),
    "half a page": truncate_to(10_000),
    "zeros": overwrite(b"\0"),
    "ones": overwrite(b"\xff"),
    "garbage": overwrite(b"not a database."),
    "another program's": lambda path: path.write_bytes(b"x" * 10),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_catalogue_is_made_again_and_objects_are_verified(filled, origin, damage):
    repository, infos = origin
    DAMAGE[damage](filled / "catalogue" / "data.mdb")
    bad = filled / "objects" / infos[1].digest[:2] / infos[1].digest
    bad.write_bytes(b"\7" * 4096)
    with Cache(filled) as cache:
        status = cache.status()
        assert (status.budget_bytes, status.num_resident, status.resident_bytes) == (5 * 4096, 3, 3 * 4096)
        assert status.tenants["team"].guaranteed_bytes == 4096
        outcomes = [cache.acquire(info, repository).outcome for info in infos[:3]]
        assert outcomes == ["resident", "origin", "resident"]
        assert bad.read_bytes() == b"\1" * 4096
        status = cache.status()
        assert (status.num_corrupt, status.quarantined_bytes) == (1, 4096)
        assert disk_bytes(filled) == 4 * 4096


@pytest.mark.parametrize("offset", [8192, 12288, 20480])
def test_a_catalogue_with_zeros_in_its_middle_is_made_again_or_read_rightly(filled, offset):
    """In a process of its own: LMDB might die of it."""
    zero_from(offset)(filled / "catalogue" / "data.mdb")
    code = "import sys; from datasvc.cache import Cache\n"
    code += "print(Cache(sys.argv[1]).status().num_resident)"
    done = subprocess.run([sys.executable, "-c", code, filled], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_a_damaged_catalogue_that_others_use_is_left_alone(cache, origin):
    repository, infos = origin
    process = hold_in_a_process(cache, repository, infos[:1])
    folder = cache.folder
    cache.close()
    catalogue = folder / "catalogue" / "data.mdb"
    shutil.copy(catalogue, catalogue.with_name("copy"))
    catalogue.unlink()  # truncated it would kill its user
    with pytest.raises(CorruptDataError, match=r"is damaged.*other processes use it: stop these"):
        Cache(folder)
    assert object_path(cache, infos[0]).exists()
    kill(process)
    with Cache(folder) as again:
        assert again.acquire(infos[0], repository).outcome == "resident"


def test_after_a_crash_of_the_machine_objects_are_verified_before_use(filled, origin, monkeypatch):
    repository, infos = origin
    path = filled / "objects" / infos[0].digest[:2] / infos[0].digest
    path.write_bytes(b"\1" * 4096)  # what a power cut may leave
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    with Cache(filled) as cache:
        assert {record.state for record in cache._opened.catalogue.objects().values()} == {UNVERIFIED}
        assert cache.acquire(infos[0], repository).outcome == "origin"
        assert path.read_bytes() == b"\0" * 4096
        assert cache.status().num_corrupt == 1


def test_a_catalogue_of_another_boot_is_not_even_opened(filled, monkeypatch):
    """What a power cut leaves of it may be anything, and LMDB dies of some of that."""
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    opened = []
    real = lmdb.open

    def opening(path, **options):
        opened.append(sorted(os.listdir(path)))
        return real(path, **options)

    monkeypatch.setattr(lmdb, "open", opening)
    Cache(filled).close()
    assert opened == [["lock.mdb"]]


def test_a_reboot_while_the_catalogue_was_made_again_makes_it_again(filled, monkeypatch):
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    real = recovery.Catalogue.rebuild

    def cut(self, *arguments):
        real(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(recovery.Catalogue, "rebuild", cut)
    with pytest.raises(KeyboardInterrupt):
        Cache(filled)
    monkeypatch.setattr(recovery.Catalogue, "rebuild", real)
    with Cache(filled) as cache:
        assert (cache.budget_bytes, cache.status().num_resident) == (4 * 4096, 3)


def test_without_its_budget_nothing_is_evicted_until_one_is_given(filled, monkeypatch):
    (filled / "cache.json").unlink()
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    with pytest.raises(ConfigError, match="has no budget yet"):
        Cache(filled)
    with Cache(filled, budget=2 * 4096) as cache:
        assert cache.status().num_resident == 2


def test_what_a_dead_fetch_left_does_not_survive_a_reboot_uncounted(filled, origin, monkeypatch):
    repository, infos = origin
    with Cache(filled) as cache:
        die_while_fetching(cache, repository, infos[5])
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    with Cache(filled) as cache:
        assert disk_bytes(filled) == cache.status().resident_bytes == 3 * 4096


def test_files_that_are_no_objects_are_left_alone(filled, origin, monkeypatch):
    folder = filled / "objects" / "zz"
    folder.mkdir()
    (folder / ("z" * 64)).write_text("x")
    (filled / "objects" / "note").write_text("x")
    misplaced = folder / origin[1][7].digest
    misplaced.write_text("x")
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    with Cache(filled) as cache:
        assert cache.status().num_resident == 3
    assert misplaced.exists()


def test_a_folder_of_the_first_format_is_taken_over(tmp_path, origin):
    """Its catalogue had JSON in tables of the same names, and no cache.json lay beside."""
    repository, infos = origin
    folder = tmp_path / "cache"
    (folder / "catalogue").mkdir(parents=True)
    with lmdb.open(str(folder / "catalogue"), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"1", db=env.open_db(b"meta", txn=txn))
        txn.put(infos[0].digest.encode(), b'{"state": "resident"}', db=env.open_db(b"objects", txn=txn))
    path = folder / "objects" / infos[0].digest[:2] / infos[0].digest
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\0" * 4096)
    with Cache(folder, budget=4096) as cache:
        assert cache.acquire(infos[0], repository).outcome == "resident"


def test_opening_frees_what_it_had_opened_when_it_fails(filled):
    (filled / "cache.json").write_bytes(b"{}")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CorruptDataError):
            Cache(filled)
    assert len(os.listdir("/proc/self/fd")) == before


def fill_as(cache, repository, infos):
    for info in infos:
        cache.acquire(info, repository)
        cache.release(info.digest)


def test_tenants_keep_what_they_had_when_the_catalogue_is_made_again(tmp_path, origin, monkeypatch):
    """On a file system without extended attributes all would be the default tenant's."""
    repository, infos = origin
    folder = tmp_path / "cache"
    with Cache(folder, budget=5 * 4096) as cache, Cache(folder, tenant="team") as team:
        cache.set_quota("team", Quota(3 * 4096))
        fill_as(team, repository, infos[:3])
        fill_as(cache, repository, infos[3:5])
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    with Cache(folder) as cache:
        assert cache._opened.catalogue.read(CatalogueTables.account).used_bytes == {
            "team": 3 * 4096,
            "default": 2 * 4096,
        }
        assert [cache.acquire(info, repository).outcome for info in infos[:5]] == ["resident"] * 5


@pytest.mark.parametrize("budget", [None, 5 * 4096])
def test_objects_of_all_tenants_that_fit_the_budget_survive_a_restart(tmp_path, origin, monkeypatch, budget):
    repository, infos = origin
    folder = tmp_path / "cache"
    with Cache(folder, budget=5 * 4096) as cache:
        fill_as(cache, repository, infos[:5])
    path = folder / "cache.json"
    quotas = {"team": Quota(3 * 4096), "default": Quota(0, 2 * 4096)}
    path.write_bytes(Configuration(5 * 4096, quotas).encode())
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    with Cache(folder, budget=budget) as cache:
        assert cache.status().num_resident == 5
        assert "evicted" not in cache.counters()


def test_what_does_not_fit_after_a_restart_goes_from_those_above_their_guarantee(tmp_path, origin, monkeypatch):
    repository, infos = origin
    folder = tmp_path / "cache"
    with Cache(folder, budget=5 * 4096) as cache, Cache(folder, tenant="team") as team:
        cache.set_quota("team", Quota(2 * 4096))
        fill_as(cache, repository, infos[:3])
        fill_as(team, repository, infos[3:5])
    (folder / "cache.json").write_bytes(Configuration(3 * 4096, {"team": Quota(2 * 4096)}).encode())
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    with Cache(folder) as cache:
        assert cache._opened.catalogue.read(CatalogueTables.account).used_bytes == {"team": 2 * 4096, "default": 4096}
