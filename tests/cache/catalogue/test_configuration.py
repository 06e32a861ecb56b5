"""What is set for a cache, which budgets are valid, and which folders can be one."""

import os
import pathlib
import shutil
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache import Cache, Quota
from datasvc.cache.catalogue import files as files_module
from datasvc.cache.catalogue import recovery
from datasvc.cache.catalogue.configuration import Configuration, check_folder, file_system_of, parse_budget
from datasvc.cache.catalogue.files import Files
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError
from datasvc.repository import Repository
from tests.support.fuzzing import changed_bytes, counts_refusals

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / {place}/home rw,relatime shared:20 - nfs4 server:/home rw,vers=4.2
41 22 0:36 / {place}/with\\040space rw - fuse.sshfs host: rw
42 22 0:37 / {place}/twice rw - nfs server:/ rw
43 22 0:38 / {place}/twice rw - tmpfs none rw
44 22 0:39 / {place}/bucket rw - fuse mountpoint-s3 rw
45 22 0:40 / {place}/drive rw - fuse Rclone:drive rw
46 22 0:41 / {place}/juice rw - fuse.juicefs JuiceFS:volume rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("home", "nfs4"),
        ("home/me/cache", "nfs4"),
        ("home2", "ext4"),
        ("with space/cache", "fuse.sshfs"),
        ("twice/cache", "tmpfs"),
        ("bucket/cache", "fuse.mountpoint-s3"),
        ("drive", "fuse.rclone"),
        ("juice", "fuse.juicefs"),
        ("", "ext4"),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_the_innermost_last_mount(tmp_path, folder, kind):
    assert file_system_of(tmp_path / folder, MOUNTS.format(place=tmp_path)) == kind


@pytest.mark.parametrize(
    "kind",
    ["nfs4", "wekafs", "panfs", "fuse.juicefs", "fuse.gcsfuse", "fuse.rclone", "fuse.mountpoint-s3", "fuse.sshfs"],
)
def test_a_folder_on_a_network_file_system_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("datasvc.cache.catalogue.configuration.file_system_of", lambda *_: kind)
    with pytest.raises(ConfigError, match=f"is on {kind}, a network file system.*put the cache on a local disk"):
        Cache(tmp_path / "cache", budget=4096)


@pytest.mark.parametrize("kind", ["xfs", "overlay", "fuseblk", "fuse.mergerfs", "fuse.fuse-overlayfs"])
def test_a_folder_on_a_local_file_system_is_a_cache(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("datasvc.cache.catalogue.configuration.file_system_of", lambda *_: kind)
    Cache(tmp_path / "cache", budget=4096).close()


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        check_folder(tmp_path / "cache")


@pytest.mark.parametrize("moment", range(5))
def test_processes_that_make_a_cache_at_once_do_not_refuse_each_other(tmp_path, monkeypatch, moment):
    """Another process makes the folder between any two looks of this one at it."""
    folder = tmp_path / "cache"
    folder.mkdir()
    real, looks = Path.exists, []

    def exists(path):
        there = real(path)
        looks.append(path)
        if len(looks) == moment:
            Files(folder)
        return there

    if moment == 0:
        Files(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", exists)
        check_folder(folder)


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "of an earlier boot"])
def test_a_process_may_join_at_every_moment_of_an_opening(tmp_path, is_new):
    """After each call that the opening process makes, another one makes its first steps, up to where it waits."""
    folder = tmp_path / "cache"
    if not is_new:
        Cache(folder, budget="10MB").close()
        (folder / "catalogue" / "boot").write_text("another boot")
    outcomes = []

    def join(frame, event, _):
        if event != "c_return" or frame.f_code.co_filename not in files_of_code:
            return
        try:
            Files(folder)
        except ConfigError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("joined")

    files_of_code = {recovery.__file__, files_module.__file__, pathlib.__file__, shutil.__file__}
    sys.setprofile(join)
    try:
        cache = Cache(folder, budget="10MB")
    finally:
        sys.setprofile(None)
    cache.close()
    assert len(outcomes) > 20
    assert set(outcomes) == {"joined"}


def test_a_file_where_the_cache_shall_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="as a cache"):
        Cache(tmp_path / "file", budget=1)


def test_a_repository_is_no_cache_and_loses_nothing(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    info = repository.objects.put(b"the only copy")
    with pytest.raises(ConfigError, match="is a repository"):
        Cache(tmp_path / "repo", budget=1)
    (tmp_path / "repo" / "datasvc.json").unlink()
    with pytest.raises(ConfigError, match="choose a folder that is used by the cache alone"):
        Cache(tmp_path / "repo", budget=1)
    assert repository.objects.read(info.digest) == b"the only copy"


@given(st.integers(1, 10**15), st.dictionaries(st.text(max_size=9), st.integers(0, 10**12), max_size=4))
def test_a_configuration_survives(budget, guarantees):
    quotas = {name: Quota(least, least + 1) for name, least in guarantees.items()}
    if sum(guarantees.values()) <= budget:
        configuration = Configuration(budget, quotas)
        assert Configuration.decode(configuration.encode(), "it") == configuration


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"format": "x"}',
        b'{"format": 2, "budget_bytes": null, "tenants": {}}',
        b'{"format": 2, "budget_bytes": 1, "tenants": {"a": {"guaranteed_bytes": "x"}}}',
        b'{"format": 2, "budget_bytes": 1e999, "tenants": {}}',
        b'{"format": 2, "budget_bytes": 1, "tenants": {"a": {"b": 1}}}',
    ],
)
def test_a_damaged_configuration_says_what_to_do(tmp_path, content):
    Cache(tmp_path / "cache", budget=4096).close()
    (tmp_path / "cache" / "cache.json").write_bytes(content)
    with pytest.raises(CorruptDataError, match="remove it and set the budget again"):
        Cache(tmp_path / "cache")


WRITTEN = Configuration(4096, {"a": Quota(1024)}).encode()


@counts_refusals(DatasvcError)
@given(st.binary(max_size=60) | changed_bytes(WRITTEN, st.sampled_from([b" ", b"7"])))
def test_no_content_is_anything_but_an_error_of_ours(content):
    Configuration.decode(content, "cache.json")


def test_a_cache_of_a_later_format_is_refused(tmp_path):
    Cache(tmp_path / "cache", budget=4096).close()
    (tmp_path / "cache" / "cache.json").write_text('{"format": 3}')
    with pytest.raises(ConfigError, match="has format 3; this version of datasvc reads formats up to 2"):
        Cache(tmp_path / "cache")


def test_a_cache_without_a_budget_asks_for_one(tmp_path):
    with pytest.raises(ConfigError, match=r"has no budget yet.*--cache-budget of the training program"):
        Cache(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    (tmp_path / "notes").write_text("of another program")
    with pytest.raises(ConfigError, match="has no budget yet"):
        Cache(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    with pytest.raises(ConfigError, match="as a cache"):
        Cache(tmp_path / "notes")


def test_a_budget_is_kept_for_the_node_and_may_be_changed(tmp_path):
    Cache(tmp_path / "cache", budget="3kB").close()
    with Cache(tmp_path / "cache") as cache:
        assert cache.budget_bytes == 3000
        Cache(tmp_path / "cache", budget=4000).close()
        assert cache.budget_bytes == 4000


def test_lowering_the_budget_evicts_objects_without_holds_at_once(cache, origin):
    repository, infos = origin
    for info in infos[:5]:
        cache.acquire(info, repository)
    for info in infos[:3]:
        cache.release(info.digest)
    Cache(cache.folder, budget=3 * 4096 + 1).close()
    assert cache.status().resident_bytes == 3 * 4096
    Cache(cache.folder, budget=100).close()
    assert cache.status().resident_bytes == 2 * 4096  # held by this process


def test_quotas_and_budget_set_at_once_by_many_are_all_kept(tmp_path):
    with Cache(tmp_path / "cache", budget=10**9) as cache:
        names = [f"t{number}" for number in range(8)]
        threads = [threading.Thread(target=cache.set_quota, args=(name, Quota(4096))) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert set(cache.status().tenants) >= set(names)


def test_a_tenant_is_never_evicted_below_its_guarantee(cache, origin):
    repository, infos = origin
    cache.set_quota("mine", Quota(2 * 4096))
    with Cache(cache.folder, tenant="mine") as mine:
        for info in infos[:2]:
            mine.acquire(info, repository)
            mine.release(info.digest)
        for info in infos[2:]:
            cache.acquire(info, repository)
            cache.release(info.digest)
        status = cache.status()
        assert status.tenants["mine"].used_bytes == 2 * 4096
        assert status.tenants["default"].used_bytes == 3 * 4096
        assert [mine.acquire(info, repository).outcome for info in infos[:2]] == ["resident"] * 2


def test_a_tenant_at_its_maximum_evicts_its_own(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)
    cache.release(infos[0].digest)
    cache.set_quota("small", Quota(0, 4096))
    with Cache(cache.folder, tenant="small") as small:
        for info in infos[1:4]:
            small.acquire(info, repository)
            small.release(info.digest)
    assert cache.status().tenants["small"].used_bytes == 4096
    assert cache.acquire(infos[0], repository).outcome == "resident"


def test_a_mount_point_may_have_any_letters(tmp_path):
    place = tmp_path / "Größe é"
    place.mkdir()
    mounts = "1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {} rw - nfs4 b rw\n".format(str(place).replace(" ", "\\040"))
    assert file_system_of(place, mounts) == "nfs4"


def test_a_configuration_that_another_thread_replaces_meanwhile_is_read_all_the_same(cache):
    class Replaced(dict):
        """What was just found in it is there no more."""

        def __contains__(self, _key):
            return True

    cache._opened.catalogue._tables.configurations = Replaced()
    assert cache.budget_bytes == 5 * 4096


def test_a_share_is_one_of_the_disk(tmp_path):
    total = shutil.disk_usage(tmp_path).total
    assert parse_budget("10%", tmp_path / "not" / "there" / "yet") == int(total * 0.1)


@pytest.mark.parametrize(
    ("text", "size"), [("50GB", 50 * 10**9), (" 1.5 KiB ", 1536), ("4096", 4096), ("2tb", 2 * 10**12)]
)
def test_a_budget_is_a_size(text, size, tmp_path):
    assert parse_budget(text, tmp_path) == size


@pytest.mark.parametrize("text", ["0", "0%", "0GB"])
def test_a_budget_of_nothing_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="expected more than 0 bytes"):
        parse_budget(text, tmp_path)


@pytest.mark.parametrize("text", ["-1", "x", "", "%", "-5%", "10 percent", "1e9", "nan", "101%", "9" * 400])
def test_what_is_no_budget_is_refused_before_the_folder_is_made(text, tmp_path):
    with pytest.raises(ConfigError):
        Cache(tmp_path / "cache", budget=text)
    assert not (tmp_path / "cache").exists()
