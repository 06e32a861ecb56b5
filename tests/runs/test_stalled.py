"""Runs whose program hangs while the thread of the log goes on."""

import time
import types

import pytest

from datasvc.repository import Repository
from datasvc.runs import RunLog, RunSummary, list_runs, read_run, run_log
from datasvc.testing import FakeClock
from datasvc.views.run_words import describe_stall, warnings

STALLED = {"operation": "'allreduce.grad'", "ranks": [1, 3]}


@pytest.fixture
def clock(monkeypatch):
    """A clock of the process that writes: only the test moves it."""
    clock = FakeClock(1000.0)
    # `flush` is the only reason to write: the tests decide what a part has.
    monkeypatch.setattr(run_log, "time", types.SimpleNamespace(monotonic=clock, time=time.time))
    return clock


@pytest.fixture
def repository(tmp_path):
    return Repository.create(str(tmp_path / "repo"))


def open_log(repository):
    return RunLog.open(repository, "cnn", flush_s=3600.0)


def flushed(repository, log):
    assert log.flush()
    (run,) = list_runs(repository)
    return run


def test_a_run_that_reports_nothing_is_stalled_although_its_log_is_written(repository, clock):
    with open_log(repository) as log:
        for step in (1, 2):
            log.report("step", step=step, step_s=0.5)
        assert not flushed(repository, log).is_stalled
        clock.now_s += 59
        assert not flushed(repository, log).is_stalled
        clock.now_s += 2
        run = flushed(repository, log)
        assert (run.state, run.is_stalled, run.idle_s) == ("running", True, 61.0)
        assert "has reported nothing for 61 s by the clock of its machine" in describe_stall(run)
        assert describe_stall(run) in warnings(read_run(repository, log.name, log.id))
        log.report("step", step=3, step_s=0.5)
        assert not flushed(repository, log).is_stalled
        clock.now_s += 61
    assert not list_runs(repository)[0].is_stalled  # it has ended


def test_a_part_of_other_events_shows_that_the_program_goes_on(repository, clock):
    with open_log(repository) as log:
        clock.now_s += 700
        assert flushed(repository, log).is_stalled
        log.report("restored", version="cnn@1")
        assert not flushed(repository, log).is_stalled


def test_an_evaluation_is_no_stall_but_what_follows_it_may_be(repository, clock):
    with open_log(repository) as log:
        for step in (1, 2):
            log.report("step", step=step, step_s=0.5)
        log.report("busy", work="evaluation")
        clock.now_s += 7200
        run = flushed(repository, log)
        assert (run.busy, run.is_stalled) == ("evaluation", False)
        log.report("evaluation", step=2, accuracy=0.5)
        assert flushed(repository, log).busy == ""
        clock.now_s += 61
        assert flushed(repository, log).is_stalled
    assert [event.event for event in read_run(repository, log.name, log.id).events] == ["evaluation"]


def test_a_hang_after_a_checkpoint_is_a_stall_and_the_time_of_saving_is_none_of_a_step(
    repository, clock, monkeypatch
):
    began_s = time.time() - clock.now_s
    monkeypatch.setattr(run_log.time, "time", lambda: began_s + clock.now_s)
    with open_log(repository) as log:
        for step in (1, 2):
            log.report("step", step=step)
            clock.now_s += 1
        for _ in range(2):
            log.report("busy", work="checkpoint")
            clock.now_s += 500
        log.report("busy")
        run = flushed(repository, log)
        assert (run.busy, run.step_interval_s) == ("", 1)
        clock.now_s += 61
        assert flushed(repository, log).is_stalled
        log.report("step", step=3)
        assert flushed(repository, log).step_interval_s == 62


def test_ranks_that_do_not_come_are_named_until_the_next_step(repository, clock):
    with open_log(repository) as log:
        log.report("step", step=1)
        log.report("busy", work="checkpoint")
        log.report("stalled", operation="'allreduce.grad'", ranks=[1, 3], waited_s=60.0)
        run = flushed(repository, log)
        assert (run.stalled, run.busy, run.is_stalled) == (STALLED, "checkpoint", True)
        assert "ranks 1, 3 did not submit 'allreduce.grad'" in describe_stall(run)
        # The warnings of the engine are no sign that the program goes on.
        clock.now_s += 61
        log.report("stalled", operation="'allreduce.grad'", ranks=[1, 3], waited_s=120.0)
        assert flushed(repository, log).idle_s == 61
        log.report("step", step=2)
        run = flushed(repository, log)
        assert (run.stalled, run.is_stalled) == (None, False)


def summary(**changes):
    values = {"name": "cnn", "id": "1", "state": "running", "message": "", "started_s": 0.0, "last_s": 100.0}
    values |= {"num_attempts": 1, "latest": {}, "versions": [], "world_size": 1, "data": [], "num_lost": 0}
    return RunSummary(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "limit_s"),
    [
        ({"step_interval_s": 1.0, "latest": {"step_s": 1.0}}, 60),
        ({"step_interval_s": 10.0, "latest": {"step_s": 10.0}}, 200),
        # One report for fifty steps of two seconds.
        ({"step_interval_s": 100.0, "latest": {"step_s": 2.0}}, 300),
        # Before its second report of a step a program compiles, and stages data.
        ({}, 600),
        ({"latest": {"step_s": 1.0}}, 600),
        ({"step_interval_s": 1.0, "latest": {"step_s": "nan"}}, 60),
    ],
)
def test_the_limit_follows_the_steps_of_the_run(changes, limit_s):
    assert not summary(**changes, idle_s=limit_s).is_stalled
    assert summary(**changes, idle_s=limit_s + 0.1).is_stalled
    assert not summary(**changes, idle_s=limit_s + 0.1, state="not responding").is_stalled


def test_any_values_of_a_log_are_read(repository):
    with open_log(repository) as log:
        log.report("busy", work=["<b>"] * 500)
        log.report("stalled", operation={"a": 1}, ranks="all")
        run = flushed(repository, log)
        assert run.stalled == {"operation": "{'a': 1}", "ranks": []}
        assert len(run.busy) == 200
        log.report("stalled", ranks=[1.5, None, 2, *range(100)])
        run = flushed(repository, log)
        assert run.stalled["ranks"] == [2, 0, 1, 2, 3, 4]
