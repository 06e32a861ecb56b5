"""Scrub finds what changed on the disk, also under a job that has it mapped."""

import mmap

from datasvc.cache import status
from tests.cache.fetch.test_fetch import mark_unverified
from tests.cache.processes import disk_bytes, hold_in_a_process, kill, object_path
from tests.progress import RecordedProgress


def fill(cache, repository, infos):
    for info in infos:
        cache.acquire(info, repository)
        cache.release(info.digest)


def flip(cache, info):
    path = object_path(cache, info)
    content = bytearray(path.read_bytes())
    content[17] ^= 4
    with path.open("r+b") as file:  # in place: whoever has it mapped sees it
        file.write(content)


def test_a_sound_cache_is_left_as_it_is(cache, origin):
    repository, infos = origin
    fill(cache, repository, infos[:5])
    progress = RecordedProgress()
    done = cache.scrub(progress)
    assert (done.num_checked, done.checked_bytes, done.corrupt, done.held) == (5, 20480, (), ())
    assert (progress.totals, progress.total) == ([20480], 20480)


def test_a_flipped_byte_is_found_put_away_and_fetched_again(cache, origin):
    repository, infos = origin
    fill(cache, repository, infos[:3])
    flip(cache, infos[1])
    done = cache.scrub()
    assert (done.corrupt, done.held) == ((infos[1].digest,), ())
    status = cache.status()
    assert (status.num_resident, status.num_corrupt, status.quarantined_bytes) == (2, 1, 4096)
    assert (cache.folder / "quarantine" / infos[1].digest).read_bytes()[17] == 5
    assert cache.acquire(infos[1], repository).path.read_bytes() == b"\1" * 4096
    assert cache.scrub().corrupt == ()


def test_quarantine_makes_room_before_anything_of_use_does(cache, origin):
    repository, infos = origin
    fill(cache, repository, infos[:5])
    flip(cache, infos[1])
    cache.scrub()
    cache.acquire(infos[1], repository)
    assert cache.status().quarantined_bytes == 0
    assert cache.status().num_resident == 5
    assert list((cache.folder / "quarantine").iterdir()) == []


def test_a_bad_object_that_jobs_have_mapped_is_reported_and_counts_until_they_let_go(cache, origin):
    repository, infos = origin
    fill(cache, repository, infos[:5])
    process = hold_in_a_process(cache, repository, infos[:1])
    flip(cache, infos[0])
    with object_path(cache, infos[0]).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        done = cache.scrub()
        assert (done.corrupt, done.held) == ((infos[0].digest,), (infos[0].digest,))
        assert view[17] == 4  # still mapped: nothing was unlinked under it
        cache.acquire(infos[5], repository)  # needs room, which the mapped file would not give
        status = cache.status()
        assert (status.quarantined_bytes, status.num_resident) == (4096, 4)
        assert disk_bytes(cache.folder) == 5 * 4096
    kill(process)
    fill(cache, repository, infos[6:8])
    assert cache.status().quarantined_bytes == 0
    assert disk_bytes(cache.folder) <= 5 * 4096


def test_a_bad_file_put_away_by_a_process_killed_before_it_said_so_counts_when_it_is_fetched_again(cache, origin):
    repository, infos = origin
    fill(cache, repository, infos[:5])
    flip(cache, infos[0])
    object_path(cache, infos[0]).rename(cache.folder / "quarantine" / infos[0].digest)
    cache.acquire(infos[0], repository)
    assert disk_bytes(cache.folder) == 5 * 4096
    assert cache.status().quarantined_bytes == 0


def test_a_hold_on_a_bad_object_is_released_like_any_other(cache, origin):
    repository, infos = origin
    cache.acquire(infos[0], repository)
    flip(cache, infos[0])
    assert cache.scrub().held == (infos[0].digest,)
    assert cache.acquire(infos[0], repository).outcome == "origin"
    cache.release(infos[0].digest)
    cache.release(infos[0].digest)
    assert cache.status().held_bytes == 0


def test_what_a_scan_found_is_verified_by_a_scrub(cache, origin, monkeypatch):
    repository, infos = origin
    fill(cache, repository, infos[:2])
    mark_unverified(cache, infos[0])
    assert cache.scrub().num_checked == 2

    def reading(*_arguments):
        raise AssertionError

    monkeypatch.setattr("datasvc.cache.fetch.fetch.digest_of_file", reading)
    assert cache.acquire(infos[0], repository).outcome == "resident"


def while_it_is_read(monkeypatch, work):
    """Do something between the reading of an object and the verdict."""
    real = status.digest_of_file

    def reading(file):
        found = real(file)
        work()
        return found

    monkeypatch.setattr(status, "digest_of_file", reading)


def test_a_job_that_maps_a_bad_object_while_it_is_read_is_reported_and_its_room_counts(cache, origin, monkeypatch):
    repository, infos = origin
    fill(cache, repository, infos[:5])
    flip(cache, infos[0])
    processes = []
    while_it_is_read(
        monkeypatch,
        lambda: processes or processes.append(hold_in_a_process(cache, repository, infos[:1])),
    )
    done = cache.scrub()
    assert (done.corrupt, done.held) == ((infos[0].digest,), (infos[0].digest,))
    cache.acquire(infos[5], repository)
    assert (cache.status().quarantined_bytes, disk_bytes(cache.folder)) == (4096, 5 * 4096)
    kill(processes[0])


def test_the_good_copy_that_came_meanwhile_is_not_taken_for_the_bad_one(cache, origin, monkeypatch):
    """Another scrub was faster, and the object has been fetched again before this one judges it."""
    repository, infos = origin
    fill(cache, repository, infos[:1])
    flip(cache, infos[0])

    def meanwhile():
        monkeypatch.undo()
        assert cache.check(infos[0].digest) == "corrupt"
        fill(cache, repository, infos[:1])

    while_it_is_read(monkeypatch, meanwhile)
    assert cache.scrub().corrupt == ()
    assert cache.counters()["corrupt"] == 1
    assert cache.acquire(infos[0], repository).outcome == "resident"


def test_a_link_in_an_object_s_place_is_no_hit_and_no_sound_object(cache, origin, tmp_path):
    repository, infos = origin
    fill(cache, repository, infos[:3])
    foreign = tmp_path / "foreign"
    path = object_path(cache, infos[1])
    for content in (b"x" * 4096, path.read_bytes(), b""):
        foreign.write_bytes(content)
        path.unlink()
        path.symlink_to(foreign)
        acquired = cache.acquire(infos[1], repository)
        assert (acquired.outcome, acquired.path.is_symlink()) == ("origin", False)
        assert acquired.path.read_bytes() == b"\1" * 4096
        cache.release(infos[1].digest)
        assert foreign.read_bytes() == content
        path.unlink()
        path.symlink_to(foreign)
        assert cache.scrub().corrupt == (infos[1].digest,)
        assert not path.is_symlink()
        fill(cache, repository, infos[1:2])
    assert cache.scrub().corrupt == ()
