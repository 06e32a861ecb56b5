"""gc removes what no log names and what is old, and nothing else: whoever writes or dies meanwhile."""

import errno
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from datasvc.api.gc import GRACE_S, Garbage, discard_referenced, gc, gc_at, list_old, sweep
from datasvc.api.referenced_objects import referenced_objects
from datasvc.cli.datasets.maintain import gc as command
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.models import describe_model, restore, save
from datasvc.models.registry.retention import remove
from datasvc.repository import Repository
from datasvc.repository.branching import create_branch, remove_branch
from datasvc.repository.logs.log import encode_entry
from datasvc.repository.removal import remove_versions
from datasvc.repository.store.storage import Storage
from datasvc.runs import RunLog, list_runs, read_run
from datasvc.runs.run_folders import delete_run
from datasvc.shards import ingest, open_dataset
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.verify import verify
from tests.repository.conftest import url  # noqa: F401 - the fixture: each kind of store
from tests.shards.written_versions import write_version
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
DAY = 24 * 3600
LATER = time.time() + GRACE_S + DAY


def texts(*names):
    return [{"key": name, "text": f"text of {name}"} for name in names]


def make_old(repository, age_s=GRACE_S + DAY):
    """Let every file of a local repository be that old."""
    for path in Path(repository.url).rglob("*"):
        os.utime(path, (time.time() - age_s,) * 2)


def objects_of(repository):
    return {file.path.rpartition("/")[2] for file in repository.storage.walk("objects")}


def tensors(value):
    return {"model": {"w": torch.full((40_000,), value), "b": torch.ones(3)}}


@pytest.fixture
def anywhere(url):  # noqa: F811
    return Repository.create(url)


@pytest.fixture
def full(repository):
    """Two versions of a data set with deletions, a model, and 3 objects that nothing names; all of it old."""
    write_version(repository, "pets", {"train": [texts("a", "b"), texts("c")], "val": [texts("d")]})
    delete(repository, "pets", keys=["a"])
    save(repository, "cnn", tensors(1.0), step=1)
    for content in (b"1", b"22", b"333"):
        repository.objects.put(content)
    make_old(repository)
    return repository


def check_all(repository):
    """Read every byte of every version."""
    for name in repository.names("datasets"):
        for number in repository.versions("datasets", name).numbers():
            assert verify(repository, f"{name}@{number}", deep=True).problems == ()
    for name in repository.names("models"):
        for number in repository.versions("models", name).numbers():
            restore(repository, f"{name}@{number}")


def test_what_nothing_names_is_removed_and_everything_else_stays(full):
    before = objects_of(full)
    done = gc(full, dry_run=False)
    assert sorted(info.size_bytes for info in done.objects) == [1, 2, 3]
    assert (done.size_bytes, done.num_kept) == (6, len(before) - 3)
    assert objects_of(full) == before - {info.digest for info in done.objects}
    check_all(full)
    assert gc(full, dry_run=False).objects == ()


def test_on_every_store_named_objects_stay_and_the_rest_goes(anywhere):
    write_version(anywhere, "pets", {"train": [texts("a", "b"), texts("c")]})
    lost = anywhere.objects.put(b"nobody names me")
    done = gc_at(anywhere, LATER, dry_run=False)
    assert done.objects == (lost,)
    assert verify(anywhere, "pets", deep=True).problems == ()
    assert anywhere.objects.size(lost.digest) is None


def test_without_being_told_to_gc_removes_nothing(full):
    before = objects_of(full)
    done = gc(full)
    assert (done.dry_run, len(done.objects), done.num_kept) == (True, 3, len(before) - 3)
    assert objects_of(full) == before


def test_what_is_young_stays(full):
    young = full.objects.put(b"a writer will name this")
    named = len(objects_of(full)) - 4
    done = gc(full, dry_run=False)
    assert (len(done.objects), done.num_kept) == (3, named + 1)
    assert full.objects.size(young.digest) == young.size_bytes


def test_an_object_that_any_text_of_an_entry_names_stays(full):
    quarantine = full.objects.put(b"bad samples")
    entry = dict(full.versions("datasets", "pets").read(1).content)
    full.versions("datasets", "pets").append(
        lambda _head: {**entry, "of a later datasvc": [{"x": quarantine.digest}]}
    )
    make_old(full)
    gc(full, dry_run=False)
    assert full.objects.read(quarantine.digest) == b"bad samples"


def test_a_grace_that_running_writers_do_not_survive_is_refused(full):
    with pytest.raises(ConfigError, match=r"at least 48 h.*--no-writers"):
        gc(full, grace_s=47 * 3600)
    with pytest.raises(ConfigError):
        gc(full, grace_s=-1, no_writers=True)
    full.objects.put(b"young")
    assert len(gc_at(full, time.time() + 1, grace_s=0).objects) == 4


@pytest.mark.parametrize("kind", ["datasets", "models"])
@pytest.mark.parametrize("damage", ["changed entry", "no fields", "table missing", "table changed"])
def test_what_cannot_be_read_stops_gc_before_anything_is_removed(full, kind, damage):
    name = full.names(kind)[0]
    log = full.versions(kind, name)
    path = Path(full.url, log.path, "00000001.json")
    content = log.read(1).content
    table = content["tensors"] if kind == "models" else content["splits"]["train"]["table"]
    where = full.objects.local_path(table)
    if damage == "changed entry":
        path.write_bytes(path.read_bytes().replace(b'"message": ""', b'"message": "x"'))
    elif damage == "no fields":
        path.write_bytes(encode_entry({"format": 1}))
    elif damage == "table missing":
        where.unlink()
    else:
        where.write_bytes(b"x" + where.read_bytes()[1:])
    before = objects_of(full)
    with pytest.raises((CorruptDataError, NotFoundError), match="Nothing was deleted"):
        gc(full, dry_run=False)
    assert objects_of(full) == before


def test_a_removed_version_may_be_swept_by_a_gc_that_began_later_or_had_a_shorter_grace(full):
    table = full.versions("models", "cnn").read(1).content["tensors"]
    save(full, "cnn", tensors(2.0), step=2)
    full.removals("models", "cnn").add([1])
    removed_s = next(full.storage.walk("models/cnn/removals")).modified_s
    full.objects.local_path(table).unlink()
    assert set(referenced_objects(full, removed_s - 5))
    assert set(referenced_objects(full, removed_s - 60))
    # A tagged version is not removed.
    full.removals("models", "cnn").restore([1], "")
    full.tag("models", "cnn@1", "stable")
    full.removals("models", "cnn").add([1])
    with pytest.raises((CorruptDataError, NotFoundError), match="missing"):
        list(referenced_objects(full, removed_s - 5))


def test_a_damaged_table_of_a_removed_version_costs_no_index_of_its_other_splits(full):
    splits = full.versions("datasets", "pets").read(1).content["splits"]
    index = open_dataset(full, "pets@1")["val"].table.index(0)
    full.removals("datasets", "pets").add([1, 2])
    make_old(full)
    path = full.objects.local_path(splits["train"]["table"])
    path.write_bytes(path.read_bytes()[:-1])
    assert gc(full, dry_run=False).objects
    assert full.objects.read(index)


@pytest.mark.parametrize("kind", ["datasets", "models"])
def test_a_table_of_a_removed_version_that_is_missing_is_missing_for_the_version_that_shares_it(full, kind):
    name = full.names(kind)[0]
    content = full.versions(kind, name).read(1).content
    again = {field: value for field, value in content.items() if field not in {"format", "commit", "created"}}
    full.versions(kind, name).append(lambda _head: again)
    full.removals(kind, name).add([1])
    table = content["tensors"] if kind == "models" else content["splits"]["train"]["table"]
    full.objects.local_path(table).unlink()
    before = objects_of(full)
    for grace_s in (GRACE_S, 0):  # the removal is younger, and older
        with pytest.raises((CorruptDataError, NotFoundError), match="Nothing was deleted"):
            gc_at(full, time.time() + 1, dry_run=False, grace_s=grace_s)
    assert objects_of(full) == before


def test_a_version_of_another_age_of_datasvc_stops_gc(full):
    entry = dict(full.versions("datasets", "pets").read(1).content)
    later = {**entry, "format": 99}
    Path(full.url, "datasets/pets/versions/00000003.json").write_bytes(encode_entry(later))
    with pytest.raises(ConfigError, match=r"upgrade datasvc.*Nothing was deleted"):
        gc(full, dry_run=False)


def test_objects_of_unfinished_work_stay_while_its_journal_is_young_and_go_with_it(full):
    journal = full.journal("plan", "1")
    journal.begin()
    shard, index = full.objects.put(b"shard so far"), full.objects.put(b"its index")
    journal.write("train-0", {"shard": {"digest": shard.digest}, "indexes": [index.digest]})
    make_old(full)
    Path(full.url, "journal/plan-1/train-1.json").write_bytes(b"half a rec")  # a young record, damaged
    assert len(gc(full, dry_run=False).objects) == 3
    assert full.objects.read(shard.digest) == b"shard so far"
    make_old(full)
    done = gc(full, dry_run=False)
    assert {info.digest for info in done.objects} == {shard.digest, index.digest}
    assert done.journals == ("journal/plan-1",)
    assert not Path(full.url, "journal/plan-1").exists()


def test_a_journal_that_somebody_came_back_to_is_kept(full):
    journal = full.journal("plan", "1")
    journal.begin()
    make_old(full)
    before_s = time.time() - GRACE_S
    garbage = list_old(full, before_s)
    assert garbage.journals == ["journal/plan-1"]
    journal.write("train-0", {"x": 1})
    assert sweep(full, garbage, before_s).journals == []
    assert journal.read_all().keys() == {"train-0"}


def test_unfinished_files_of_killed_writers_go_once_they_are_old(full):
    old = ["objects/.tmp-1", "objects/ab/.tmp-2", "datasets/pets/versions/.tmp-3", ".tmp-4"]
    for path in old:
        Path(full.url, path).parent.mkdir(exist_ok=True)
        Path(full.url, path).write_bytes(b"half")
    make_old(full)
    Path(full.url, "objects/.tmp-5").write_bytes(b"being written")
    done = gc(full, dry_run=False)
    assert sorted(done.temporary_files) == sorted(old)
    assert [path.name for path in Path(full.url).rglob(".tmp-*")] == [".tmp-5"]


def test_the_log_of_a_run_goes_with_its_last_version_and_others_stay(repository):
    logs = {name: RunLog.open(repository, name) for name in ("kept", "removed", "unsaved")}
    for log in logs.values():
        log.close()
    for name in ("kept", "removed"):
        for step in (1, 2):
            save(repository, name, tensors(float(step)), step=step, run=logs[name].ref)
    remove(repository, ["kept@1"])
    remove(repository, ["removed@1", "removed@2"])
    assert gc(repository, dry_run=False).runs == ()
    make_old(repository)
    signals = [f"signals/{logs[name].ref}/loss/1.parquet" for name in ("removed", "kept")]
    for path in signals:
        repository.storage.create(path, b"values")
    assert gc_at(repository, LATER, dry_run=True).runs == (logs["removed"].ref,)
    assert len(list_runs(repository)) == 3
    assert gc_at(repository, LATER, dry_run=False).runs == (logs["removed"].ref,)
    assert {run.name for run in list_runs(repository)} == {"kept", "unsaved"}
    assert [repository.storage.size(path) for path in signals] == [None, 6]
    aged = gc_at(repository, LATER, dry_run=False, runs_older_than_s=GRACE_S)
    assert aged.runs == (logs["kept"].ref, logs["unsaved"].ref)
    assert list_runs(repository) == []
    with pytest.raises(ConfigError, match="at least"):
        gc(repository, runs_older_than_s=1.0)


def test_a_run_that_was_continued_while_gc_ran_keeps_its_log(repository):
    log = RunLog.open(repository, "cnn")
    log.close()
    save(repository, "cnn", tensors(1.0), step=1, run=log.ref)
    remove(repository, ["cnn@1"])
    make_old(repository)
    garbage = Garbage(runs=[log.ref])
    RunLog.open(repository, "cnn", run_id=log.id).close()
    assert sweep(repository, garbage, time.time() - DAY).runs == []
    assert list_runs(repository)[0].num_attempts == 2


def test_a_run_that_is_continued_while_its_log_is_deleted_keeps_its_headers(repository, monkeypatch):
    log = RunLog.open(repository, "cnn")
    log.close()
    make_old(repository)
    delete = Storage.delete_if_older

    def continue_after(storage, path, before_s):
        is_deleted = delete(storage, path, before_s)
        monkeypatch.undo()
        RunLog.open(repository, "cnn", run_id=log.id).close()
        return is_deleted

    monkeypatch.setattr(Storage, "delete_if_older", continue_after)
    assert not delete_run(repository.storage, log.ref, time.time() - DAY)
    assert read_run(repository, "cnn", log.id).headers.keys() == {1, 2}


def test_strange_files_in_the_repository_are_left_alone(full):
    strange = ["objects/README", "objects/ab/short", f"objects/ab/{'c' * 64}", "notes/todo.txt", "objects/a/b/c"]
    for path in strange:
        Path(full.url, path).parent.mkdir(parents=True, exist_ok=True)
        Path(full.url, path).write_bytes(b"mine")
    make_old(full)
    gc(full, dry_run=False)
    assert all(Path(full.url, path).exists() for path in strange)


# A commit at every point of a gc. Its objects exist already, old and unnamed, and the writer comes upon them.
@pytest.mark.parametrize("point", ["before the list", "before the marks", "before the sweep"])
def test_a_commit_that_races_with_gc_keeps_all_its_objects(repository, point):
    samples = {"train": [texts("a", "b"), texts("c")]}
    write_version(repository, "lost", samples)
    make_old(repository)
    Path(repository.url, "datasets/lost/versions/00000001.json").unlink()
    before_s = time.time() - GRACE_S

    def commit(now):
        if now == point:
            write_version(repository, "pets", samples)

    commit("before the list")
    garbage = list_old(repository, before_s)
    assert bool(garbage.objects) == (point != "before the list")
    commit("before the marks")
    discard_referenced(garbage, referenced_objects(repository, before_s))
    assert bool(garbage.objects) == (point == "before the sweep")
    commit("before the sweep")
    assert sweep(repository, garbage, before_s).objects == {}
    check_all(repository)


def test_a_journal_whose_work_commits_while_gc_reads_the_marks_loses_nothing(repository, monkeypatch):
    """Journals are read first: one that is gone by then has its entry in the log already."""
    samples = {"train": [texts("a")]}
    write_version(repository, "other", {"train": [texts("x")]})
    write_version(repository, "lost", samples)
    entry = Path(repository.url, "datasets/lost/versions/00000001.json")
    named = set(
        Repository.open(repository.url).versions("datasets", "lost").read(1).content["splits"]["train"].values()
    )
    journal = repository.journal("plan", "1")
    journal.begin()
    journal.write("train-0", {"shards": sorted(each for each in named if isinstance(each, str))})
    kept = entry.read_bytes()
    entry.unlink()
    real, read = repository.storage.read, []

    def committing(path, *limits):
        # The writer commits and removes its journal just after gc looked at the first file for its marks.
        content = real(path, *limits)
        if not read:
            entry.write_bytes(kept)
            journal.remove()
        read.append(path)
        return content

    monkeypatch.setattr(repository.storage, "read", committing)
    marks = set(referenced_objects(repository, 0))
    assert read[0].startswith("journal/")
    assert {each for each in named if isinstance(each, str)} <= marks


GC = """
import os, signal, sys
from datasvc.api.gc import gc
from datasvc.repository import Repository
left = int(sys.argv[1])
real = os.unlink
def dying(*arguments, **options):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
os.unlink = dying
gc(Repository.open(sys.argv[2]), dry_run=False)
"""


@pytest.mark.parametrize("point", [1, 4, *(pytest.param(point, marks=pytest.mark.slow) for point in (2, 3, 99))])
def test_a_gc_killed_half_way_took_nothing_that_is_named_and_the_next_one_goes_on(full, point):
    words = [warm_python.command(), "-c", GC, str(point), full.url]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == (-9 if point <= 3 else 0)
    check_all(full)
    report = gc(full, dry_run=False)
    # An object is renamed before it is removed.
    assert len(report.objects) + len(report.temporary_files) == max(0, 4 - point)
    check_all(full)


def test_an_object_that_vanishes_meanwhile_is_no_error(full):
    garbage = list_old(full, time.time() - GRACE_S)
    discard_referenced(garbage, referenced_objects(full, 0))
    gone, *left = garbage.objects
    full.objects.local_path(gone).unlink()
    assert sorted(sweep(full, garbage, time.time() - GRACE_S).objects) == sorted(left)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5)),
        st.tuples(st.just("commit"), st.integers(0, 5)),
        st.tuples(st.just("save"), st.integers(0, 2)),
        st.tuples(st.just("age"), st.just(0)),
        st.tuples(st.just("gc"), st.just(0)),
    ),
    max_size=12,
)


@given(operations)
def test_whatever_happened_before_gc_every_version_stays_whole(tmp_path_factory, steps):
    repository = Repository.create(str(tmp_path_factory.mktemp("gc") / "repo"))
    put = set()
    for action, value in [*steps, ("age", 0), ("gc", 0)]:
        if action == "put":
            put.add(repository.objects.put(b"%d" % value).digest)
        elif action == "commit":
            write_version(repository, f"set-{value % 2}", {"train": [texts(f"{value}"), texts("shared")]})
        elif action == "save":
            save(repository, "cnn", {"w": torch.full((value + 1,), 2.0)}, step=1)
        elif action == "age":
            make_old(repository)
        else:
            gc(repository, dry_run=False)
            for name in repository.names("datasets"):
                for number in repository.versions("datasets", name).numbers():
                    assert sum(1 for _ in open_dataset(repository, f"{name}@{number}")["train"]) == 2
            for number in repository.versions("models", "cnn").numbers():
                restore(repository, f"cnn@{number}")
    assert not put & objects_of(repository)


def test_an_error_of_the_store_stops_gc_as_what_it_is(full, monkeypatch):
    def failing(*_arguments):
        raise PermissionError("not yours")

    monkeypatch.setattr("datasvc.repository.store.file_age.Path.unlink", failing)
    with pytest.raises(DatasvcError, match="not yours"):
        gc(full, dry_run=False)
    monkeypatch.undo()
    check_all(full)


def drifting(repository, versions):
    """Save weights that change little: each version's are stored as a difference to those of the one before."""
    torch.manual_seed(0)
    states = [torch.randn(60_000) * 0.02]
    for step in range(versions):
        save(repository, "cnn", {"w": states[-1]}, step=step)
        states.append(states[-1] + torch.randn(60_000) * 1e-6)
    return states[:-1]


def pointers_of(repository):
    return {file.path for file in repository.storage.walk("tensors")}


def test_what_a_difference_follows_on_stays_when_the_version_that_stored_it_is_removed(repository):
    states = drifting(repository, 3)
    repository.removals("models", "cnn").add([1, 2])
    make_old(repository)
    before = objects_of(repository)
    done = gc(repository, dry_run=False)
    assert {info.digest for info in done.objects} < before
    assert torch.equal(restore(repository, "cnn@3").state["w"], states[2])
    assert {len(info.digest) for info in done.objects} == {64}  # tables and states went, links stayed


def test_pointers_go_with_the_chunks_that_nothing_names_and_the_others_stay(repository):
    drifting(repository, 2)
    save(repository, "cnn", {"w": torch.randn(60_000)}, step=2)
    assert len(pointers_of(repository)) == 3
    repository.removals("models", "cnn").add([1, 2])
    make_old(repository)
    before = pointers_of(repository)
    planned, done = gc(repository), gc(repository, dry_run=False)
    assert len(pointers_of(repository)) == 1
    assert set(planned.pointers) == set(done.pointers) == before - pointers_of(repository)
    assert save(repository, "other", restore(repository, "cnn@3").state, step=0)
    assert describe_model(repository, "other").entry["stored_bytes"] == 0


def test_what_was_removed_just_now_counts_as_named_for_whoever_builds_on_it(repository):
    drifting(repository, 1)
    make_old(repository)
    repository.removals("models", "cnn").add([1])
    assert gc(repository, dry_run=False).objects == ()
    make_old(repository)
    assert len(gc(repository, dry_run=False).objects) >= 3


# ---------------------------------------------------------------------------------------------- clocks


class FastClock:
    """This machine's clock, some seconds ahead of the store's; times of files are the store's."""

    def __init__(self, ahead_s):
        self.ahead_s = ahead_s

    def time(self):
        return time.time() + self.ahead_s

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.fixture
def saving(anywhere):
    """A repository in which a save has stored its tensors, and not yet committed."""
    save(anywhere, "cnn", tensors(1.0), step=1)
    return anywhere, anywhere.objects.put(b"stored by a save that runs now")


@pytest.mark.parametrize("ahead_s", [GRACE_S + DAY, -GRACE_S, 3700])
def test_on_a_machine_with_a_wrong_clock_gc_is_refused_and_removes_nothing(saving, ahead_s, monkeypatch):
    repository, stored = saving
    monkeypatch.setattr("datasvc.api.gc.time", FastClock(ahead_s))
    with pytest.raises(ConfigError, match=r"clock of this machine shows .* nothing was deleted\. Correct the clock"):
        gc(repository, dry_run=False)
    assert repository.objects.read(stored.digest) == b"stored by a save that runs now"


def test_gc_goes_by_the_stores_clock_and_leaves_nothing_of_what_it_asked_it_with(saving, monkeypatch):
    repository, stored = saving
    before = {file.path for file in repository.storage.walk("")}
    monkeypatch.setattr("datasvc.api.gc.time", FastClock(3500))
    # By this machine's clock all of it is old enough.
    assert gc(repository, grace_s=3000, no_writers=True, dry_run=False).objects == ()
    assert {file.path for file in repository.storage.walk("")} == before
    assert repository.objects.size(stored.digest) == stored.size_bytes


def refuse_to_write(monkeypatch, cause):
    """Let nothing be written to stores in memory any more; OSError is what a read-only mount raises."""
    if cause == "driver":
        monkeypatch.setattr("datasvc.repository.store.exclusive_create.creates_exclusively", lambda _driver: False)
        return
    error = {"mount": errno.EROFS, "credentials": errno.EACCES, "full": errno.ENOSPC}[cause]

    def refuse(_driver, path, *_words, **_options):
        raise OSError(error, os.strerror(error), path)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)


@pytest.mark.parametrize("cause", ["mount", "credentials", "full", "driver"])
def test_a_dry_run_on_what_cannot_be_written_goes_by_this_machines_clock_and_says_so(cause, monkeypatch, capsys):
    place = f"memory://gc-{cause}"
    lost = Repository.create(place).objects.put(b"nobody names me")
    refuse_to_write(monkeypatch, cause)
    done = gc(Repository.open(place), grace_s=0, no_writers=True)
    assert done.objects == (lost,)
    assert done.clock_warning.startswith(said := "ages are measured by the clock of this machine")
    command(repo=place, grace="0s", no_writers=True)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(said)]
    command(repo=place, grace="0s", no_writers=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["clock_warning"].startswith(said)
    with pytest.raises(DatasvcError, match=r"cannot (be )?writ"):
        gc(Repository.open(place), grace_s=0, no_writers=True, dry_run=False)


def test_a_dry_run_on_what_can_be_written_warns_of_no_clock_and_refuses_a_wrong_one(anywhere, monkeypatch):
    assert gc(anywhere).clock_warning is None
    monkeypatch.setattr("datasvc.api.gc.time", FastClock(2 * 3600))
    with pytest.raises(ConfigError, match="clock of this machine shows"):
        gc(anywhere)


def test_what_gc_asked_the_time_with_is_removed_by_the_next_one_if_it_was_killed(repository, monkeypatch):
    monkeypatch.setattr(type(repository.storage), "remove_temporary", lambda *_: None)
    repository.storage.now_s()
    make_old(repository)
    assert len(gc(repository, dry_run=False).temporary_files) == 1


def test_gc_keeps_what_a_version_on_a_branch_has_until_the_version_itself_is_removed(repository):
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "a"}]]})
    create_branch(repository, "pets", "work")
    ingest(repository, [{"key": "b", "text": "b"}], "pets@work", append=True)
    only_there = {shard.digest for shard in open_dataset(repository, "pets@work")["train"].table.shards()} - {
        shard.digest for shard in open_dataset(repository, "pets")["train"].table.shards()
    }
    assert len(only_there) == 1
    for act in (lambda: None, lambda: remove_branch(repository, "pets", "work")):
        act()
        gc(repository, grace_s=0, no_writers=True, dry_run=False)
        assert [sample["key"] for sample in open_dataset(repository, "pets@2")["train"]] == ["a", "b"]
    remove_versions(repository, "datasets", ["pets@2"])
    report = gc_at(repository, repository.storage.now_s() + 10, grace_s=0, dry_run=False)
    assert only_there <= {info.digest for info in report.objects}
    assert [sample["key"] for sample in open_dataset(repository, "pets")["train"]] == ["a"]
