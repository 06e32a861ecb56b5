"""A worker and a driver's store, and the store of one round."""

import datetime as dt
import os
import queue
import socket
import sys
import threading

import pytest
from torch.distributed import TCPStore

from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous import rendezvous as rendezvous_module
from datasvc.trainer.rendezvous.messages import (
    MESSAGE_QUEUE,
    Leave,
    Notice,
    RankAssignment,
    RankRequest,
    ScriptError,
    answer_key,
    broken_key,
    decode,
    encode,
    notice_queue,
    training_key,
)
from datasvc.trainer.rendezvous.rendezvous import Rendezvous, RoundStore, report_uncaught_errors
from tests.support.gate import Gate
from tests.support.threads import in_thread

WORKER = "localhost:0:3"
SEAT = RankAssignment(2, RankPlacement(1, 2, 0, 1, 1, 2), needs_sync=True, notice=4)


@pytest.fixture
def store():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = os.dup(listener.fileno())
        yield TCPStore(
            "127.0.0.1", listener.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=fd
        )


def test_a_worker_gets_the_answer_to_its_own_request(store):
    rendezvous = Rendezvous(WORKER, store.clone())
    rendezvous.serial, rendezvous.wants_sync = 5, False
    store.set(answer_key(WORKER, 1), encode(SEAT))
    assert rendezvous.join_round() == SEAT
    store.set(answer_key(WORKER, 2), encode(SEAT))
    rendezvous.join_round()
    asks = [decode(store.queue_pop(MESSAGE_QUEUE)) for _ in range(2)]
    assert asks == [RankRequest(WORKER, 1, 5, wants_sync=False), RankRequest(WORKER, 2, 5, wants_sync=False)]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"{",
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'{"kind": []}',
        b'{"kind": "Leave"}',
        b'{"kind": "Leave", "reason": 1}',
        b'{"kind": "RankRequest", "worker": [], "number": 1, "serial": 0, "wants_sync": true}',
        b'{"kind": "RankAssignment", "placement": {"rank": "0"}, "round_number": 1, "needs_sync": true, "notice": 0}',
    ],
)
def test_what_is_no_message_is_a_value_error(data):
    with pytest.raises(ValueError, match="is no message of an elastic job"):
        decode(data)


def test_a_worker_without_a_rank_exits_with_status_0(store, capsys):
    store.set(answer_key(WORKER, 1), encode(Leave("its slot is gone")))
    with pytest.raises(SystemExit) as caught:
        Rendezvous(WORKER, store).join_round()
    assert caught.value.code == 0
    assert capsys.readouterr().err == "this worker leaves the job: its slot is gone\n"


class Notified:
    """A state that is told of changes of hosts."""

    def __init__(self, *, fails=False):
        self.told = queue.SimpleQueue()
        self.fails = fails

    def on_hosts_updated(self, timestamp, update_res):
        self.told.put((timestamp, update_res))
        if self.fails:
            raise KeyError("the user's own")


@pytest.fixture
def seated(store):
    """A worker in a round, whose thread waits for changes of hosts."""
    rendezvous = Rendezvous(WORKER, store.clone())
    thread = threading.Thread(target=rendezvous.receive_notices, args=(store.clone(),))
    rendezvous.thread = thread
    thread.start()
    store.set(answer_key(WORKER, 1), encode(SEAT))
    rendezvous.join_round()
    yield rendezvous
    end(rendezvous)


def end(rendezvous):
    """Returns once all notices before have been handled."""
    if rendezvous.thread.is_alive():
        rendezvous.end_notices()
        rendezvous.thread.join(20)
    assert not rendezvous.thread.is_alive()


def test_a_change_of_hosts_reaches_the_states_at_once_and_without_a_commit(store, seated):
    states = [Notified(fails=True), Notified()]
    with seated.notifying(states[0].on_hosts_updated), seated.notifying(states[1].on_hosts_updated):
        for notice in (Notice(5, 1), Notice(6, 2)):
            store.queue_push(notice_queue(WORKER), encode(notice))
            assert [state.told.get(timeout=20) for state in states] == [(notice.number, notice.result)] * 2
    store.queue_push(notice_queue(WORKER), encode(Notice(7, 1)))
    end(seated)
    assert states[1].told.empty()


def test_a_listener_that_waits_does_not_keep_the_worker_from_the_next_round(store, seated):
    gate = Gate()
    store.set(answer_key(WORKER, 2), encode(RankAssignment(3, SEAT.placement, needs_sync=True, notice=5)))
    joining = threading.Thread(target=seated.join_round, daemon=True)
    with seated.notifying(gate.wait):
        store.queue_push(notice_queue(WORKER), encode(Notice(5, 1)))
        assert gate.begun.wait(20)
        joining.start()
        joining.join()
        gate.open()


def test_a_child_that_was_forked_does_not_end_the_notices_of_the_rank(store, monkeypatch):
    ends = []
    monkeypatch.setattr("atexit.register", ends.append)
    rendezvous_module._start_notices(Rendezvous(WORKER, store.clone()), store.clone())
    monkeypatch.setattr("os.getpid", lambda: -1)
    for end_notices in ends:
        end_notices()
    assert any(thread.name == "elastic-notices" for thread in threading.enumerate())
    monkeypatch.undo()
    for end_notices in ends:
        end_notices()
    assert not any(thread.name == "elastic-notices" for thread in threading.enumerate())


def test_changes_that_the_round_has_in_it_are_no_news(store, seated):
    state = Notified()
    with seated.notifying(state.on_hosts_updated):
        store.queue_push(notice_queue(WORKER), encode(Notice(4, 2)))
        store.queue_push(notice_queue(WORKER), encode(Notice(5, 1)))
        assert state.told.get(timeout=20) == (5, 1)
        assert state.told.empty()


def test_a_state_that_is_new_or_was_reset_gets_the_newest_earlier_notice(store, seated):
    early, late = Notified(), Notified()
    with seated.notifying(early.on_hosts_updated):
        store.queue_push(notice_queue(WORKER), encode(Notice(5, 1)))
        assert early.told.get(timeout=20) == (5, 1)
    with seated.notifying(late.on_hosts_updated):
        assert late.told.get_nowait() == (5, 1)
        seated.repeat_notice()
        assert late.told.get_nowait() == (5, 1)
        store.set(answer_key(WORKER, 2), encode(RankAssignment(3, SEAT.placement, needs_sync=True, notice=5)))
        seated.join_round()
        seated.repeat_notice()
        assert late.told.empty()


def test_a_programs_error_is_reported_with_its_kind(store):
    rendezvous = Rendezvous(WORKER, store)
    rendezvous.report_error(KeyError("x"))
    rendezvous.report_error(HorovodInternalError("no"), ends_job=True)
    words = [decode(store.queue_pop(MESSAGE_QUEUE)) for _ in range(2)]
    assert words[0] == ScriptError(WORKER, "KeyError: 'x'")
    assert words[1] == ScriptError(WORKER, "HorovodInternalError: no", ends_job=True)


def test_an_error_outside_the_training_function_is_reported_and_still_shown(store, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[1]))
    report_uncaught_errors(Rendezvous(WORKER, store.clone()))
    errors = [HorovodInternalError("a rank is lost"), KeyError("lr")]
    for error in errors:
        sys.excepthook(type(error), error, None)
    assert shown == errors
    assert decode(store.queue_pop(MESSAGE_QUEUE)) == ScriptError(WORKER, "KeyError: 'lr'")


def test_the_driver_can_see_whether_the_training_function_of_a_worker_has_returned(store, seated):
    def is_training():
        return store.check([training_key(WORKER)])

    assert is_training()
    seated.begin_training()
    seated.end_program()
    assert is_training(), "the function was left by sys.exit"
    seated.end_training()
    assert not is_training()
    store.set(answer_key(WORKER, 2), encode(SEAT))
    seated.join_round()
    assert not is_training()
    seated.begin_training()
    assert is_training()


def test_a_program_without_a_training_function_has_finished_when_it_ends_in_order(store, monkeypatch):
    ends = []
    monkeypatch.setattr("atexit.register", ends.append)
    rendezvous = Rendezvous(WORKER, store.clone())
    store.set(answer_key(WORKER, 1), encode(SEAT))
    rendezvous.join_round()
    rendezvous_module._start_notices(rendezvous, store.clone())
    (end_notices,) = ends
    end_notices()
    assert not store.check([training_key(WORKER)])


def test_a_wait_for_a_key_ends_when_a_member_dies(store):
    member = RoundStore(store.clone(), prefix="trainer/2", broken_key=broken_key(2), timeout_s=60.0)
    thread, raised = in_thread(lambda: member.get("address"))
    store.set(broken_key(2), "rank 1 is gone")
    thread.join(20)
    assert isinstance(raised[0], RuntimeError)
    assert str(raised[0]) == "rank 1 is gone"


def test_the_store_of_a_round_has_keys_of_its_own_and_times_out(store):
    rounds = [RoundStore(store, prefix=f"trainer/{n}", broken_key=broken_key(n), timeout_s=60.0) for n in (1, 2)]
    rounds[0].set("key", "old")
    assert rounds[0].get("key") == b"old"
    assert not rounds[1].check(["key"])
    assert rounds[1].add("count", 2) == 2
    with pytest.raises(RuntimeError, match="has set key in time"):
        rounds[1].wait(["key"], dt.timedelta(seconds=0.01))
    rounds[1].set_timeout(dt.timedelta(seconds=0.01))
    with pytest.raises(RuntimeError, match="has set key in time"):
        rounds[1].get("key")
