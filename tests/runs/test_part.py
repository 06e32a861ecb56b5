"""Parts of an attempt: each write replaces one of them whole, and no event is lost, whatever fails or is killed."""

import threading
from functools import partial

import pytest

from datasvc.errors import DatasvcError
from datasvc.repository import Repository
from datasvc.repository.store.storage import Storage
from datasvc.runs import RunLog, follow_run, read_run
from datasvc.runs.content import Content
from datasvc.runs.facts import make_event
from datasvc.runs.part import AttemptWriter, Part, PartRange, encode_part
from datasvc.runs.run_folders import new_run_id, run_folder
from datasvc.runs.step_table import StepTable
from datasvc.testing import FaultyStore

HEAD = {"state": "running", "latest": {}, "versions": [], "time": 1.0, "heartbeat_s": 20.0, "lost": 0}


class KilledError(BaseException):
    """The end of the process."""


class WatchedStorage(Storage):
    """A file tree that calls `before(number)` before its operations that change it, numbered from 1 on."""

    before = staticmethod(lambda number: None)
    num_changes = 0

    def create(self, path, content):
        self._count()
        super().create(path, content)

    def delete_if_older(self, path, before_s):
        self._count()
        return super().delete_if_older(path, before_s)

    def _count(self):
        self.num_changes += 1
        self.before(self.num_changes)


@pytest.fixture
def repository(tmp_path):
    return Repository.create(str(tmp_path / "repo"))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    # Recent content is moved after every few writes.
    monkeypatch.setattr("datasvc.runs.part._RECENT_BYTES", 700)


def content_of(step):
    """Return one step and one note."""
    table = StepTable.from_rows(("loss",), [(step, float(step), (float(step),))])
    return Content([table], [make_event(step, "note", {"step": step})])


def write(writer, steps, *, is_last=False):
    for step in steps:
        writer.write(HEAD, content_of(step), is_last=is_last)


def seen(repository, run_id):
    """Return the steps of the notes, check that the curve has the same, and that the log has no problem."""
    history = read_run(repository, "cnn", run_id)
    assert not history.problems
    steps = [event.facts["step"] for event in history.events]
    assert steps == (history.series["loss"].steps.tolist() if steps else [])
    return steps


def parts_of(repository, run_id):
    return sorted(filter(None, map(PartRange.parse, repository.storage.list(run_folder("cnn", run_id)))))


def test_an_attempt_has_few_files_while_it_goes_on_and_two_parts_after_its_end(repository):
    run_id = new_run_id()
    writer = AttemptWriter(repository.storage, run_folder("cnn", run_id), 1)
    for step in range(1, 40):
        write(writer, [step])
        assert len(parts_of(repository, run_id)) <= 3
    assert seen(repository, run_id) == [*range(1, 40)]
    write(writer, [40], is_last=True)
    most, end = parts_of(repository, run_id)
    assert (most.first, most.last + 1, end.first) == (1, end.last, end.last)
    assert seen(repository, run_id) == [*range(1, 41)]


def test_a_writer_may_be_killed_before_any_of_its_changes_and_readers_find_what_it_had_written(repository):
    def die(last, number):
        if number == last:
            raise KilledError

    for kill_at in range(1, 40):
        storage, run_id, step = WatchedStorage(repository.url), new_run_id(), 0
        storage.before = partial(die, kill_at)
        writer = AttemptWriter(storage, run_folder("cnn", run_id), 1)
        repository.storage.create(f"{run_folder('cnn', run_id)}/00000001.json", b"{}")
        with pytest.raises(KilledError):
            for step in range(1, 40):
                write(writer, [step])
        parts = parts_of(repository, run_id)
        found = [event.facts["step"] for event in read_run(repository, "cnn", run_id).events]
        assert found in ([*range(1, step)], [*range(1, step + 1)])
        assert len(parts) <= 4


def test_a_reader_finds_every_event_before_each_change(repository):
    storage, run_id, found = WatchedStorage(repository.url), new_run_id(), []
    writer = AttemptWriter(storage, run_folder("cnn", run_id), 1)
    write(writer, [1])
    storage.before = lambda _: found.append(seen(repository, run_id))
    write(writer, range(2, 30))
    assert all(steps == [*range(1, len(steps) + 1)] for steps in found)
    assert sorted(found) == found
    assert len(found[-1]) >= 28


@pytest.mark.parametrize("effect", ["refused", "unanswered"])
@pytest.mark.parametrize("operation", ["write", "delete"])
@pytest.mark.parametrize("fail_at", [1, 4, 6])
def test_the_store_may_fail_at_any_write(operation, effect, fail_at):
    with FaultyStore() as store:
        repository, run_id = Repository.create(store.url), new_run_id()
        writer = AttemptWriter(repository.storage, run_folder("cnn", run_id), 1)
        write(writer, range(1, fail_at))
        store.fail(operation, "runs/*", effect=effect)
        for step in range(fail_at, fail_at + 3):
            try:
                write(writer, [step])
            except DatasvcError:
                assert operation == "write"
        store.heal()
        write(writer, range(fail_at + 3, 20))
        assert seen(repository, run_id) == [*range(1, 20)]
        write(writer, [20], is_last=True)
        assert seen(repository, run_id) == [*range(1, 21)]


def test_a_reader_that_follows_gets_each_event_once(repository):
    run_id, cursor, steps = new_run_id(), "", []
    writer = AttemptWriter(repository.storage, run_folder("cnn", run_id), 1)
    for step in range(1, 60):
        write(writer, [step])
        if step % 7 == 0 or step % 5 == 0:
            new = follow_run(repository, "cnn", run_id, cursor)
            cursor = new.cursor
            steps += [event.facts["step"] for event in new.events]
    assert steps == [*range(1, len(steps) + 1)]


def test_a_log_with_many_parts_of_an_attempt_is_read(repository):
    """As earlier releases wrote them: eight parts became one, and those that it replaced might stay."""
    run_id = new_run_id()
    for first, last in [(1, 8), (1, 64), (65, 72), (65, 65), (66, 66), (73, 73), (74, 74)]:
        part = Part(PartRange(1, first, last), HEAD, content_of(last))
        path = f"{run_folder('cnn', run_id)}/{part.range.file_name}"
        repository.storage.create(path, encode_part(part))
    assert seen(repository, run_id) == [64, 72, 73, 74]


def test_a_writer_that_was_only_suspended_does_not_hide_the_attempt_that_continued_the_run(repository):
    with RunLog.open(repository, "cnn", flush_s=3600.0) as old:
        old.report("step", step=10, loss=1.0)
        assert old.flush()
        with RunLog.open(repository, "cnn", run_id=old.id, flush_s=3600.0) as new:
            new.report("step", step=8, loss=2.0)
            assert new.flush()
            old.report("step", step=11, loss=1.0)
            assert old.flush()
            history = read_run(repository, "cnn", old.id)
            assert (history.summary.state, history.summary.step, history.summary.num_attempts) == ("running", 8, 2)
            assert history.series["loss"].steps.tolist() == [8]


def test_parts_of_a_remote_store_are_read_at_once_and_in_order():
    with FaultyStore() as store:
        repository, run_id = Repository.create(store.url), new_run_id()
        for attempt in range(1, 5):
            writer = AttemptWriter(repository.storage, run_folder("cnn", run_id), attempt)
            write(writer, [attempt])
        # Each read waits until three others have begun.
        gate = threading.Barrier(4, timeout=60)
        storage = repository.storage

        def wait_for_others(path, *arguments, **options):
            if path.endswith(".jsonl"):
                gate.wait()
            return Storage.read_checked(storage, path, *arguments, **options)

        storage.read_checked = wait_for_others
        assert seen(repository, run_id) == [1, 2, 3, 4]
