"""gc removes empty folders and old garbage while writers use both again."""

import os
import time
from pathlib import Path

import pytest
import torch

from datasvc import durable
from datasvc.api.gc import GRACE_S, discard_referenced, gc, list_old, referenced_objects, sweep
from datasvc.models import restore, save
from datasvc.repository.logs.log import Log
from datasvc.repository.objects import presence
from datasvc.repository.store import file_age
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import write_version

OLD = time.time() - GRACE_S - 24 * 3600
SAMPLES = {"train": [[{"key": "a", "text": "x"}]]}
STATE = {"w": torch.full((40_000,), 3.0), "b": torch.ones(3)}


def make_old(repository):
    for path in Path(repository.url).rglob("*"):
        os.utime(path, (OLD, OLD))


def folders(repository):
    return {str(path.relative_to(repository.url)) for path in Path(repository.url).rglob("*") if path.is_dir()}


def write(repository, kind):
    if kind == "datasets":
        write_version(repository, "pets", SAMPLES)
    else:
        save(repository, "cnn", STATE, step=1)


def check(repository, kind):
    if kind == "datasets":
        assert verify(repository, "pets@1", deep=True).problems == ()
    else:
        assert torch.equal(restore(repository, "cnn@1").state["w"], STATE["w"])


def test_empty_folders_of_ended_work_do_not_use_up_the_inodes(repository):
    """rucio/rucio#8820, OCFL/ocfl-java#8: folders that a deletion has emptied stay for ever."""
    write(repository, "models")
    repository.objects.put(b"nothing refers to this")
    kept = folders(repository)
    root = Path(repository.url)
    for empty in ("journal/1-2", "models/gone/tags/best", "runs/gone/r1", "objects/zz", "datasets/x/versions"):
        (root / empty).mkdir(parents=True)
    (root / "notes/mine").mkdir(parents=True)
    make_old(repository)
    (root / "journal/young").mkdir()
    gc(repository, dry_run=True)
    assert "runs/gone/r1" in folders(repository)
    objects = gc(repository, dry_run=False).objects
    assert len(objects) == 1
    emptied = f"objects/{objects[0].digest[:2]}"
    still_used = {f"objects/{file.path.split('/')[1]}" for file in repository.storage.walk("objects")}
    # Folders of others, those in the root and young ones stay.
    expected = (kept - ({emptied} - still_used)) | {"notes", "notes/mine", "journal", "journal/young"}
    assert folders(repository) - {"datasets", "runs"} == expected
    check(repository, "models")


@pytest.mark.parametrize("kind", ["datasets", "models"])
def test_a_writer_whose_empty_folder_is_removed_before_its_file_is_written_makes_it_again(
    repository, monkeypatch, kind
):
    """micronaut-projects/micronaut-object-storage#824: a clean-up of empty folders beside writers."""
    real, removed = durable.make_folder, []

    def make_folder(folder):
        real(folder)
        if Path(folder) not in removed and not os.listdir(folder) and Path(folder).parent != Path(repository.url):
            removed.append(Path(folder))
            Path(folder).rmdir()  # what gc does with an old folder at this moment

    real_is_dir = Path.is_dir

    def is_dir(folder):
        # Batches look for the folder of an object themselves: it is there, and it is removed after the look.
        if folder.parent.name == "objects" and folder not in removed:
            removed.append(folder)
            return True
        return real_is_dir(folder)

    monkeypatch.setattr(durable, "make_folder", make_folder)
    monkeypatch.setattr(Path, "is_dir", is_dir)
    write(repository, kind)
    monkeypatch.undo()
    assert any(folder.name == "versions" for folder in removed)
    assert any(folder.parent.name == "objects" for folder in removed)
    check(repository, kind)


@pytest.mark.parametrize("kind", ["datasets", "models"])
@pytest.mark.parametrize("window", ["before the check", "after the check", "at the entry", "in the deletion"])
def test_a_version_that_uses_old_garbage_again_is_whole(repository, monkeypatch, kind, window):
    """getnora-io/nora#584, goharbor/harbor#23117, quay/quay#6318: old bytes that a push has found are deleted."""
    write(repository, kind)
    make_old(repository)
    name = "pets" if kind == "datasets" else "cnn"
    Path(repository.url, kind, name, "versions/00000001.json").unlink()
    before_s = time.time() - GRACE_S
    garbage = list_old(repository, before_s)
    discard_referenced(garbage, referenced_objects(repository, before_s))
    assert garbage.objects
    swept = []

    def clean_up():
        if not swept:
            swept.append(True)
            assert sweep(repository, garbage, before_s).objects == {}

    real_find, real_append, real_delete = presence.find_missing, Log.append, file_age._delete_if_same

    def find_missing(*arguments):
        if window == "before the check":
            clean_up()
        missing = real_find(*arguments)
        if window == "after the check":
            clean_up()
        return missing

    def append(*arguments, **options):
        clean_up()
        return real_append(*arguments, **options)

    def delete_if_same(*arguments):
        # gc has found the first object old, and has its lock: the writer cannot reset the age, and writes it again.
        if not swept:
            swept.append(True)
            write(repository, kind)
        return real_delete(*arguments)

    if window == "in the deletion":
        monkeypatch.setattr(file_age, "_delete_if_same", delete_if_same)
        sweep(repository, garbage, before_s)
    else:
        monkeypatch.setattr(presence, "find_missing", find_missing)
        monkeypatch.setattr(Log, "append", append)
        write(repository, kind)
    assert swept
    check(repository, kind)
