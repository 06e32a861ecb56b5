"""What ranks of a divided model report of errors that come from lost ranks."""

import contextlib
import queue
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import datasvc.trainer as hvd
from datasvc.errors import UnavailableError
from datasvc.models.saving.rank_channel import LostRankError
from datasvc.trainer.recipes import train
from datasvc.trainer.recipes.layouts import lost_ranks
from datasvc.trainer.recipes.layouts.lost_ranks import LostRankWatch, explaining_lost_ranks
from datasvc.trainer.rendezvous.signs_of_life import SilenceTimer
from tests.support.gate import Gate


class SharedStore:
    """A store of several watches in one process."""

    def __init__(self):
        self.values = {}
        self.lock = threading.Lock()

    def clone(self):
        return self

    def set(self, key, value):
        with self.lock:
            self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        assert expected == ""
        with self.lock:
            return self.values.setdefault(key, desired.encode())


class BrokenStore(SharedStore):
    """A store whose connection is lost from the first look on."""

    def check(self, _keys):
        raise dist.DistNetworkError("the store is gone")


class WatchWithoutRank1(LostRankWatch):
    """A watch whose time for answers is over once all have answered but rank 1, which is lost or has ended."""

    def _wait_for(self, names, seconds):  # noqa: ARG002 - that of the watch
        running = [name for name in names if name != "answer/1"]
        return super()._wait_for(running, 60.0) and running == names


@pytest.fixture
def watch(monkeypatch):
    """Return a function that starts the watch of a rank of three, with short times; `ended` has those that end."""
    leaving = dict.fromkeys(("_LEAVE_S", "_ELASTIC_LEAVE_S", "_UNWIND_S"), 0.1)
    for name, seconds in {"POLL_S": 0.01, "_ANSWER_S": 0.5, **leaving}.items():
        monkeypatch.setattr(lost_ranks, name, seconds)
    monkeypatch.setattr(hvd, "size", lambda: 3)
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(lost_ranks, "_world", SimpleNamespace(pg_map={}))
    watches, ended = [], queue.Queue()

    def start(store, rank, lost_after_s=0.3, kind=LostRankWatch, **elastic):
        monkeypatch.setattr(lost_ranks, "_get_default_store", lambda: store)
        monkeypatch.setattr(hvd, "rank", lambda: rank)
        watches.append(kind(lost_after_s=lost_after_s, **elastic, end=lambda: ended.put(rank)))
        return watches[-1]

    start.ended = ended
    yield start
    for each in watches:
        each.close()


def test_the_silence_of_a_rank_is_measured_by_the_looks_of_another():
    timer = SilenceTimer(max_gap_s=1.0)
    assert [timer.look(value, now_s) for value, now_s in [("1", 5.0), ("1", 5.5), ("1", 6.25), ("2", 7.0)]] == [
        0.0,
        0.5,
        1.25,
        0.0,
    ]
    # The process that looks was stopped for a minute, and the other one may have been too.
    assert timer.look("2", 67.0) == 1.0


def test_a_lost_rank_is_reported_within_10_s():
    """Computed from the constants, because a measured time depends on the machine."""
    seen_s = lost_ranks.POLL_S  # from the last count of the lost rank to the look that sees it
    silent_s = lost_ranks.LOST_AFTER_S + lost_ranks.POLL_S  # to the first look after the limit
    answered_s = lost_ranks._ANSWER_S + lost_ranks.POLL_S / 10  # and the others see its result
    assert seen_s + silent_s + answered_s <= 10.0


@pytest.mark.slow
def test_ranks_that_stop_counting_are_reported_by_all_others_and_end_them(watch):
    store, reported = SharedStore(), []
    store.set("layout/beat/1", "7")
    store.set("layout/beat/2", "9")
    alone = watch(store, 0, connect=lambda: store, report_silent=reported.append, has_whole_model=True)
    assert watch.ended.get(timeout=30) == 0
    text = str(alone.explain(RuntimeError("gloo: closed")))
    assert "ranks 1, 2 were lost, of 3, without a sign of life for 0.3 s: read the output there" in text
    assert text.endswith("(gloo: closed)")
    assert reported == [[1, 2]]  # to the launcher of an elastic job


@pytest.mark.slow
def test_the_launcher_ends_no_rank_that_has_not_begun_or_for_a_broken_connection(watch):
    store, reported = SharedStore(), []
    store.set("layout/beat/1", "7")
    elastic = {"connect": lambda: store, "report_silent": reported.append, "has_whole_model": True}
    alone = watch(store, 0, **elastic)  # rank 2 still gets the state
    assert alone._found.wait(30)
    failed = watch(SharedStore(), 0, lost_after_s=1e6, **{**elastic, "connect": SharedStore})
    assert "ranks 1, 2 were lost" in str(failed.explain(RuntimeError("gloo: closed")))
    assert reported == [[1]]


def test_a_rank_whose_connection_to_the_store_of_a_round_is_lost_counts_again(watch):
    store = SharedStore()
    stores = [BrokenStore(), store]
    watch(store, 0, lost_after_s=1e6, connect=lambda: stores.pop(0), has_whole_model=True)
    while "layout/beat/0" not in store.values:
        threading.Event().wait(0.01)


def test_a_rank_that_fails_reports_which_rank_is_lost(watch, monkeypatch):
    monkeypatch.setattr(lost_ranks, "_ANSWER_S", 60.0)
    store = SharedStore()
    watches = {rank: watch(store, rank, lost_after_s=1e6, kind=WatchWithoutRank1) for rank in (0, 2)}
    texts = {rank: str(each.explain(RuntimeError("gloo: closed"))) for rank, each in watches.items()}
    assert {text.partition(":")[0] for text in texts.values()} == {"rank 1 was lost, of 3"}


def test_a_silent_rank_that_answers_is_not_lost(watch, monkeypatch):
    monkeypatch.setattr(lost_ranks, "_ANSWER_S", 60.0)  # all answer, however slow this machine is
    store = SharedStore()
    pulses = threading.Event()

    class Slow(LostRankWatch):
        """A watch that counts no more, as if another thread held the interpreter until it is asked."""

        def _pulse(self):
            self._num_pulses += 1
            if self._num_pulses == 1 or store.check(["layout/0/asked"]):
                super()._pulse()
                pulses.set()

    first = watch(store, 0)
    slow = watch(store, 1, lost_after_s=1e6, kind=Slow)
    third = watch(store, 2, lost_after_s=1e6)
    while "layout/0/lost" not in store.values:
        pulses.wait(0.01)
    assert store.values["layout/0/lost"] == b"[]"
    assert store.values["layout/0/asked"] == b"0 silence"
    # The next question is answered too.
    assert "a connection was lost, and all ranks run" in str(third.explain(RuntimeError("gloo: closed")))
    for each in (first, slow):
        assert each._found.wait(30)
        each.close()


def test_a_rank_that_has_ended_is_not_lost(watch, monkeypatch):
    monkeypatch.setattr(lost_ranks, "_ANSWER_S", 60.0)
    store = SharedStore()
    others = [watch(store, rank, lost_after_s=1e6, kind=WatchWithoutRank1) for rank in (0, 2)]
    last = watch(store, 1, lost_after_s=1e6)
    last.close()
    assert store.values["layout/beat/1"] == b"ended"
    assert "all ranks run" in str(others[0].explain(RuntimeError("gloo: closed")))


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_that_hangs_while_it_ends_after_an_error_is_ended(watch, monkeypatch, goes_on):
    each = watch(SharedStore(), 0, lost_after_s=1e6)
    # A program that has caught the error may go on without the job.
    monkeypatch.setattr(hvd, "is_initialized", lambda: not (goes_on and each._found.is_set()))
    with pytest.raises(hvd.HorovodInternalError), explaining_lost_ranks(each):
        raise RuntimeError("gloo: closed")
    each._threads[0].join(30)
    assert watch.ended.empty() == goes_on


def test_a_store_that_does_not_answer_is_reported(watch):
    store, gate = SharedStore(), Gate()
    store.check = gate.before(store.check)
    stopped = watch(store, 0, lost_after_s=0.02)
    assert watch.ended.get(timeout=30) == 0
    assert "the store of the job has not answered for 0.2 s" in str(stopped.explain(RuntimeError("gloo")))
    gate.open()


def test_a_lost_store_does_not_hide_the_error_of_the_step(watch):
    broken = watch(BrokenStore(), 0)
    message = str(broken.explain(RuntimeError("gloo: no route")))
    assert "the connection to the store of the job was lost" in message
    assert "(gloo: no route)" in message
    assert watch.ended.empty()


def test_a_closed_watch_reports_nothing_and_ends_no_process(watch):
    each = watch(SharedStore(), 0, lost_after_s=1e6)
    each.close()
    each._report("rank 1 was lost")
    assert each._message == ""
    assert watch.ended.empty()


def test_no_group_of_the_next_round_is_aborted(watch, monkeypatch):
    each = watch(SharedStore(), 0, lost_after_s=1e6)
    closing = threading.Thread(target=each.close)

    class Group:
        def abort(self):
            closing.start()
            closing.join(0.2)
            self.is_closed = not closing.is_alive()

    group = Group()
    monkeypatch.setattr(lost_ranks, "_world", SimpleNamespace(pg_map={group: None}))
    each._report("rank 1 was lost")
    closing.join()
    assert not group.is_closed


def test_groups_that_meshes_keep_are_deleted_also_beside_a_proxy_of_a_deleted_object(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        proxy = weakref.proxy(type("Deleted", (), {})())
        assert mesh._pg_registry  # a name of torch
        lost_ranks._drop_groups()
        assert not mesh._pg_registry
        del proxy
    finally:
        dist.destroy_process_group()


def test_a_closed_watch_ends_although_another_job_has_begun(watch):
    before = set(threading.enumerate())
    each = watch(SharedStore(), 0, lost_after_s=1e6)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    each.close()
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs training whose first evaluation or commit fails with an error."""

    def fail(error, cause=None):
        def end_epoch(_run):
            raise error from cause

        monkeypatch.setattr(train, "end_epoch", end_epoch)
        loader = SimpleNamespace(state_dict=lambda: {"epoch": 0}, epoch=1)
        watch = SimpleNamespace(
            explain=lambda found: hvd.HorovodInternalError(f"rank 2 was lost ({found})"),
            leave=lambda: None,
            has_found=False,
        )
        run = SimpleNamespace(loader=loader, is_over=False, checkpoints=contextlib.nullcontext())
        train.train_to_end(run, watch=watch)

    return fail


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("gloo/transport/tcp/pair.cc: closed by peer"), None),
        (LostRankError("rank 0 lost its neighbour"), None),
        (UnavailableError("the save failed"), LostRankError("rank 0 lost its neighbour")),
    ],
)
def test_an_evaluation_or_a_commit_says_which_rank_is_lost(run, error, cause):
    with pytest.raises(hvd.HorovodInternalError, match="rank 2 was lost"):
        run(error, cause)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), UnavailableError("no connection to the bucket")])
def test_other_errors_stay_as_they_are(run, error):
    with pytest.raises(type(error)) as caught:
        run(error)
    assert caught.value is error


def test_contexts_that_are_nested_explain_an_error_once(watch):
    store = SharedStore()
    each = watch(store, 0, lost_after_s=1e6)
    with (
        pytest.raises(hvd.HorovodInternalError) as caught,
        explaining_lost_ranks(each),
        explaining_lost_ranks(each),
    ):
        raise RuntimeError("gloo: closed")
    assert str(caught.value).count("were lost") == 1


class RoundStore(SharedStore):
    """A store of a round of an elastic job, whose launcher has seen the end of a process."""

    def find_broken(self):
        return "rank 2, worker a:2:2 has exited"


def test_a_loss_that_the_launcher_reports_ends_the_collectives_of_a_round_and_no_process(watch):
    waiting = watch(None, 0, lost_after_s=1e6, connect=RoundStore)
    with pytest.raises(hvd.HorovodInternalError, match="rank 2, worker a:2:2 has exited"):  # noqa: SIM117
        with explaining_lost_ranks(waiting):
            assert waiting._found.wait(60.0)
            raise RuntimeError("the group was aborted")
    assert watch.ended.empty()
