import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from datasvc.repository import Storage
from datasvc.repository.logs.journal import Journal


@pytest.fixture
def storage(url):
    return Storage(url)


def test_the_same_work_continues_under_the_same_attempt_with_its_records(storage):
    attempt, has_changed = Journal(storage, "plan", "as it was").begin()
    assert not has_changed
    Journal(storage, "plan", "as it was", attempt).write("00000001", {"shards": [1, 2]})
    Journal(storage, "plan", "as it was", attempt).write("00000000", {"shards": []})
    again = Journal(storage, "plan", "as it was")
    assert again.begin() == (attempt, False)
    assert again.read_all() == {"00000000": {"shards": []}, "00000001": {"shards": [1, 2]}}


def test_records_of_another_state_never_count_and_the_attempt_is_new(storage):
    attempt, _ = Journal(storage, "plan", "as it was").begin()
    late = Journal(storage, "plan", "as it was", attempt)
    late.write("00000001", {"shards": [1]})
    journal = Journal(storage, "plan", "as it is")
    other, has_changed = journal.begin()
    assert has_changed
    assert other != attempt
    late.write("00000002", {"shards": [1]})  # by a worker that has not noticed yet
    assert journal.read_all() == {}


def test_work_of_another_name_has_a_journal_of_its_own(storage):
    one, other = Journal(storage, "one", "x"), Journal(storage, "other", "x")
    one.begin()
    one.write("00000001", {"shards": [1]})
    other.begin()
    assert other.read_all() == {}
    other.remove()
    assert one.read_all() == {"00000001": {"shards": [1]}}


def test_a_removed_journal_begins_a_new_attempt(storage):
    journal = Journal(storage, "plan", "x")
    attempt, _ = journal.begin()
    journal.write("00000001", {"shards": [1]})
    journal.remove()
    journal.remove()
    assert journal.read_all() == {}
    assert journal.begin()[0] != attempt


def test_a_damaged_record_is_as_if_it_were_not_there(storage):
    journal = Journal(storage, "plan", "x")
    journal.begin()
    journal.write("00000001", {"shards": [1]})
    for number, content in enumerate((b"", b"{", b'{"shards": [2], "checksum": "no"}')):
        storage.put_bytes(f"journal/plan-x/0000001{number}.json", content)
    assert journal.read_all() == {"00000001": {"shards": [1]}}
    storage.put_bytes("journal/plan-x/plan.json", b"\0" * 100)
    anew = Journal(storage, "plan", "x")
    anew.begin()
    assert anew.read_all() == {}


def test_two_that_begin_at_once_share_one_attempt(tmp_path):
    storage = Storage(str(tmp_path))
    barrier = threading.Barrier(8)

    def begin(_number):
        barrier.wait()
        return Journal(storage, "plan", "x").begin()

    with ThreadPoolExecutor(8) as pool:
        attempts = {attempt for attempt, _ in pool.map(begin, range(8))}
    assert len(attempts) == 1
