"""Attempts whose writers were killed are merged by the next one, and no event is lost that they have written."""

import threading
from collections import Counter
from functools import partial

import pytest

from datasvc.errors import UnavailableError
from datasvc.repository import Repository
from datasvc.repository.store.storage import Storage
from datasvc.runs import RunLog, follow_run, read_run
from datasvc.runs.ended_attempts import merge_ended_attempts, start_merging
from datasvc.runs.part import PartRange, decode_part
from datasvc.testing import FaultyStore

NEVER = 3600.0  # seconds between parts: only `flush` writes
LATER = 4e9  # when a writer that has not closed its log is silent


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
def logs():
    """Logs of this test. At its end their threads end, without another part."""
    opened.clear()
    yield
    for log in opened:
        log._give_up = True
        log.close()


opened = []


def open_log(repository, **options):
    opened.append(RunLog.open(repository, "cnn", **{"flush_s": NEVER, **options}))
    return opened[-1]


def write(log, steps):
    for step in steps:
        log.report("step", step=step, loss=step)
        log.report("note", step=step)
        assert log.flush()


def killed_log(repository, num_parts):
    """Return the log of a writer that goes no further, as one that was killed."""
    log = open_log(repository)
    write(log, range(1, num_parts + 1))
    return log


def seen(repository, log):
    """Return the steps of the curve and of the notes, and check that the log has no problem."""
    history = read_run(repository, log.name, log.id)
    assert not history.problems
    return history.series["loss"].steps.tolist(), [event.facts["step"] for event in history.events]


def merge(repository, log, before=lambda number: None, attempt=2, now_s=LATER):
    storage = WatchedStorage(repository.url)
    storage.before = before
    is_left = merge_ended_attempts(storage, f"runs/{log.ref}", attempt, now_s=now_s)
    return storage.num_changes, is_left


def parts_of(repository, log):
    return sorted(filter(None, map(PartRange.parse, repository.storage.list(f"runs/{log.ref}"))))


@pytest.mark.parametrize("num_parts", [3, 10, 17, 74])
def test_a_killed_attempt_becomes_one_part_and_its_end(repository, num_parts):
    log = killed_log(repository, num_parts)
    before = seen(repository, log)
    merge(repository, log)
    assert parts_of(repository, log) == [
        PartRange(1, 1, num_parts),
        PartRange(1, num_parts + 1, num_parts + 1),
    ]
    assert seen(repository, log) == before == ([*range(1, num_parts + 1)],) * 2
    summary = read_run(repository, log.name, log.id).summary
    assert (summary.state, summary.message) == ("interrupted", "the process ended without closing the log")
    assert summary.step == num_parts
    assert merge(repository, log) == (0, False)


def test_a_merge_that_is_killed_at_any_of_its_steps_loses_nothing_and_the_next_one_does_the_rest(repository):
    def die(last, number):
        if number == last:
            raise KilledError

    for kill_at in range(1, 7):
        log = killed_log(repository, 10)  # a merged part and two others
        before = seen(repository, log)
        try:
            num_changes, _ = merge(repository, log, before=partial(die, kill_at))
        except KilledError:
            assert seen(repository, log) == before
            merge(repository, log)
        assert len(parts_of(repository, log)) == 2
        assert seen(repository, log) == before
    assert num_changes == 5  # the closing part, the merged one, and three deletions


def test_a_reader_finds_every_event_before_each_change_of_a_merge(repository):
    log = killed_log(repository, 10)
    before = seen(repository, log)
    found = []
    merge(repository, log, before=lambda _: found.append(seen(repository, log)))
    assert found == [before] * 5


@pytest.mark.parametrize("num_written", [1, 9, 20])
@pytest.mark.parametrize("change", [1, 2, 3, 6])
def test_a_writer_that_was_only_suspended_goes_on_or_finds_that_its_attempt_is_ended(repository, change, num_written):
    log = killed_log(repository, 12)
    is_ended = change > 1  # else the writer creates the number of the closing part before the merge does
    last_step = 12 + num_written + 3

    def report(steps):
        for step in steps:
            log.report("step", step=step, loss=step)
            log.report("note", step=step)
            assert log.flush() is not is_ended

    _, is_left = merge(
        repository, log, before=lambda number: number == change and report(range(13, 13 + num_written))
    )
    assert is_left is not is_ended
    report(range(13 + num_written, last_step + 1))
    log.close()
    assert seen(repository, log) == ([*range(1, 13 if is_ended else last_step + 1)],) * 2
    summary = read_run(repository, log.name, log.id).summary
    assert (summary.state, summary.num_attempts) == ("interrupted" if is_ended else "finished", 1)
    assert log.num_lost == (2 * (last_step - 12) if is_ended else 0)


def test_a_writer_that_was_suspended_does_not_hide_the_attempt_that_replaced_it(repository, monkeypatch, caplog):
    monkeypatch.setattr("datasvc.runs.ended_attempts.is_silent", lambda _head, _now_s: True)
    old = killed_log(repository, 10)
    new = open_log(repository, run_id=old.id)
    write(new, range(5, 25))
    new.report("checkpoint", version="cnn@2")
    assert new.flush()
    new._merging.join()
    before = read_run(repository, old.name, old.id)

    old.report("step", step=11, loss=0)
    old.report("checkpoint", version="cnn@1")
    assert not old.flush()
    old.report("note", text="late")
    old.close("failed", "NCCL timeout")

    def facts(history):
        summary = history.summary
        return summary.state, summary.step, summary.versions, summary.num_attempts, summary.num_lost

    after = read_run(repository, old.name, old.id)
    assert facts(after) == facts(before) == ("running", 24, ["cnn@2"], 2, 0)
    assert after.series["loss"].steps.tolist() == [*range(1, 25)]
    assert old.num_lost == 3
    assert caplog.text.count("another process has continued the run") == 1

    write(new, [25])
    new.close()
    after = follow_run(repository, old.name, old.id, before.cursor)
    assert after.summary.state == "finished"
    assert after.series["loss"].steps.tolist() == [25]


def test_the_store_may_fail_at_each_operation_of_a_merge():
    for operation, path in [("read", "*"), ("list", "*"), ("write", "*"), ("delete", "*"), ("write", "*-00000010*")]:
        for effect in ("refused", "unanswered"):
            with FaultyStore() as store:
                repository = Repository.create(store.url)
                log = killed_log(repository, 10)
                before = seen(repository, log)
                store.fail(operation, f"runs/{path}", effect=effect)
                try:
                    merge(repository, log)
                except UnavailableError:
                    assert operation != "delete"
                else:
                    assert operation not in {"list", "read"}
                store.heal()
                assert seen(repository, log) == before
                merge(repository, log)
                assert len(parts_of(repository, log)) == 2
                assert seen(repository, log) == before


def test_two_merges_at_once_lose_nothing(repository):
    log = killed_log(repository, 10)
    before = seen(repository, log)
    merge(repository, log, before=lambda number: number == 2 and merge(repository, log))
    assert seen(repository, log) == before
    assert len(parts_of(repository, log)) == 2


def test_a_writer_that_reports_is_left_alone(repository):
    log = killed_log(repository, 10)
    files = parts_of(repository, log)
    assert merge(repository, log, now_s=0.0) == (0, True)
    assert parts_of(repository, log) == files


def test_an_attempt_whose_end_was_not_merged_is_merged(repository):
    with FaultyStore() as store:
        repository = Repository.create(store.url)
        log = killed_log(repository, 10)
        store.fail("write", "*.00000001-00000010.jsonl")
        log.close()
        store.heal()
        assert len(parts_of(repository, log)) > 2
        merge(repository, log, now_s=0.0)
        assert parts_of(repository, log) == [PartRange(1, 1, 10), PartRange(1, 11, 11)]
        assert read_run(repository, log.name, log.id).summary.state == "finished"


def test_parts_of_an_attempt_with_a_damaged_or_missing_one_stay(repository):
    log = killed_log(repository, 6)
    folder = repository.storage.local_path(f"runs/{log.ref}")
    third = folder / PartRange(1, 3, 3).file_name
    raw = third.read_bytes()
    third.write_bytes(raw[:-9])
    assert merge(repository, log) == (0, False)
    third.unlink()
    assert merge(repository, log) == (0, False)
    assert len(parts_of(repository, log)) == 5


def test_opening_a_run_merges_its_killed_attempts(repository, monkeypatch):
    monkeypatch.setattr("datasvc.runs.ended_attempts.is_silent", lambda _head, _now_s: True)
    first = killed_log(repository, 5)
    for attempt in range(2, 5):
        log = open_log(repository, run_id=first.id)
        write(log, range(5 * attempt, 5 * attempt + 4))
        log._merging.join()
    counts = Counter(part.attempt for part in parts_of(repository, log))
    assert counts == {1: 2, 2: 2, 3: 2, 4: 4}
    assert seen(repository, log)[1] == [*range(1, 6), *(n for k in range(2, 5) for n in range(5 * k, 5 * k + 4))]


def test_the_thread_that_merges_is_started_once_and_ends_when_the_log_is_closed(repository, monkeypatch):
    monkeypatch.setattr("datasvc.runs.ended_attempts.is_silent", lambda _head, _now_s: False)
    first = killed_log(repository, 5)
    log = open_log(repository, run_id=first.id, heartbeat_s=NEVER)
    write(log, [6])
    thread = log._merging
    write(log, [7])
    assert log._merging is thread
    assert thread.is_alive()  # it waits for the time at which the first writer is silent
    log.close()
    thread.join(60)
    assert not thread.is_alive()


def test_merging_goes_on_after_a_store_that_did_not_respond(repository, monkeypatch):
    calls = []

    def merge_attempts(*_arguments, stop):
        calls.append(stop)
        if len(calls) == 1:
            raise UnavailableError("the store does not respond")
        return False

    monkeypatch.setattr("datasvc.runs.ended_attempts.merge_ended_attempts", merge_attempts)
    start_merging(repository.storage, "runs/cnn/1", 2, 1e-9, threading.Event()).join()
    assert len(calls) == 2


def test_parts_of_a_remote_store_are_read_at_once_and_in_order():
    with FaultyStore() as store:
        repository = Repository.create(store.url)
        log = killed_log(repository, 8)
        # Each read waits until three others have begun.
        gate = threading.Barrier(4, timeout=60)
        storage = repository.storage

        def wait_for_others(path, *arguments, **options):
            if path.endswith(".jsonl"):
                gate.wait()
            return Storage.read_checked(storage, path, *arguments, **options)

        storage.read_checked = wait_for_others
        assert seen(repository, log) == ([*range(1, 9)],) * 2


def test_a_closing_part_is_an_ordinary_part_of_the_format(repository):
    log = killed_log(repository, 4)
    merge(repository, log)
    *_, end = parts_of(repository, log)
    path = f"runs/{log.ref}/{end.file_name}"
    part = decode_part(repository.storage.read(path), path, end)
    assert not part.content
    assert part.head["attempt"] == 1
