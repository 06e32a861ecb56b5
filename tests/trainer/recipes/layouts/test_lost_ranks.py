"""What ranks of a divided model report of errors that come from lost ranks."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import datasvc.trainer as hvd
from datasvc.errors import UnavailableError
from datasvc.models.saving.rank_channel import LostRankError
from datasvc.trainer.recipes import train
from datasvc.trainer.recipes.layouts import lost_ranks
from datasvc.trainer.recipes.layouts.lost_ranks import LostRankWatch


class LostStore:
    def set(self, key, value):
        raise dist.DistNetworkError(f"cannot set {key} to {value!r}")


@pytest.mark.parametrize(
    ("message", "reported"),
    [("", "a rank failed or was lost (gloo: no route)"), ("rank 2 was lost", "rank 2 was lost")],
)
def test_a_lost_store_does_not_hide_the_error_of_the_step(monkeypatch, message, reported):
    monkeypatch.setattr(lost_ranks, "_get_default_store", LostStore)
    watch = LostRankWatch.__new__(LostRankWatch)  # without its thread, which needs a job
    watch._rank, watch._message, watch._found = 1, message, threading.Event()
    assert reported in str(watch.explain(RuntimeError("gloo: no route")))


class QuietStore:
    """A store in which no rank has failed, of a job that goes on."""

    def __init__(self):
        self.is_checked = threading.Event()

    def clone(self):
        return self

    def check(self, _keys):
        self.is_checked.set()
        return False


def test_a_closed_watch_ends_although_another_job_has_begun(monkeypatch):
    store = QuietStore()
    monkeypatch.setattr(lost_ranks, "_get_default_store", lambda: store)
    for name, value in (("rank", 0), ("size", 2), ("is_initialized", True)):
        monkeypatch.setattr(hvd, name, lambda value=value: value)
    before = set(threading.enumerate())
    watch = LostRankWatch()
    (thread,) = set(threading.enumerate()) - before
    assert store.is_checked.wait(10.0)
    watch.close()
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
        watch = SimpleNamespace(explain=lambda found: hvd.HorovodInternalError(f"rank 2 was lost ({found})"))
        run = SimpleNamespace(
            loader=loader, is_over=False, checkpoints=contextlib.nullcontext(), divided=SimpleNamespace(watch=watch)
        )
        train.train_to_end(run)

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
