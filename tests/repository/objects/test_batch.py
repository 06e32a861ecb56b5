import os
from pathlib import Path

import pytest

from datasvc.errors import UnavailableError
from datasvc.repository import ObjectInfo, Repository
from datasvc.repository.objects import batch
from datasvc.repository.objects.batch import ObjectBatch
from datasvc.repository.objects.objects import digest_of
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store

CONTENTS = [bytes([number]) * (number + 1) for number in range(20)]


def info_of(content):
    return ObjectInfo(digest_of(content), len(content))


def write_all(written):
    for content in CONTENTS:
        written.write(info_of(content), content)


def temporaries(repository):
    return list(Path(repository.url, "objects").rglob(".tmp-*"))


@pytest.mark.parametrize("window", [0, 3, 1000])
def test_on_every_store_all_objects_are_there_once_a_batch_is_finished(url, monkeypatch, window):  # noqa: F811
    monkeypatch.setattr(batch, "_MAX_OPEN", window)
    objects = Repository.create(url).objects
    with ObjectBatch(objects) as written:
        write_all(written)
        written.finish()
    assert [objects.read(digest_of(content)) for content in CONTENTS] == CONTENTS


def test_each_file_is_synced_before_it_has_its_name_and_each_folder_afterwards(repository, monkeypatch):
    monkeypatch.setattr(batch, "_MAX_OPEN", 5)
    done = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(descriptor):
        fsync(descriptor)
        done.append(("synced", os.readlink(f"/proc/self/fd/{descriptor}")))

    def seen_rename(old, new):
        done.append(("named", str(new)))
        assert ("synced", str(old)) in done
        rename(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    with ObjectBatch(repository.objects) as written:
        write_all(written)
        written.finish()
    last = {path: place for place, (_, path) in enumerate(done)}
    for content in CONTENTS:
        path = str(repository.objects.local_path(digest_of(content)))
        folder = os.path.dirname(path)
        assert last[path] < last[folder]
        assert ("synced", os.path.dirname(folder)) in done


def test_an_object_that_another_stored_a_moment_ago_has_a_name_that_lasts(repository, monkeypatch):
    """That other syncs its folders only at its end, which it may not live to see."""
    content = CONTENTS[3]
    with ObjectBatch(repository.objects) as other, ObjectBatch(repository.objects) as written:
        monkeypatch.setattr(batch, "_MAX_OPEN", 0)
        other.write(info_of(content), content)
        assert repository.objects.reuse(info_of(content))
        synced = []
        fsync = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file))
        )
        written.reuse(digest_of(content))
        written.finish()
    folder = repository.objects.local_path(digest_of(content)).parent
    assert sorted(synced) == sorted([str(folder), str(folder.parent)])


def test_what_is_not_finished_is_removed_and_has_no_name(repository):
    with pytest.raises(KeyError), ObjectBatch(repository.objects) as written:
        write_all(written)
        assert len(temporaries(repository)) == len(CONTENTS)
        raise KeyError
    assert not temporaries(repository)
    assert not any(repository.objects.size(digest_of(content)) for content in CONTENTS)


def test_the_error_of_a_failed_sync_names_the_object_and_no_file_is_left(repository, monkeypatch):
    def failing(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    with ObjectBatch(repository.objects) as written:
        for content in CONTENTS[:1]:
            Path(repository.objects.local_path(digest_of(content))).parent.mkdir(parents=True)
            written.write(info_of(content), content)
        with pytest.raises(UnavailableError, match=rf"{digest_of(CONTENTS[0])}.*No space left"):
            written.finish()
    assert not temporaries(repository)
    assert repository.objects.size(digest_of(CONTENTS[0])) is None
