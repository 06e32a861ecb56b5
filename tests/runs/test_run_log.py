import json
import logging
import multiprocessing
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.repository import Repository
from datasvc.repository.objects.objects import digest_of
from datasvc.runs import RunLog, follow_run, list_runs, read_run, resolve_run
from datasvc.runs.reader import read_summary
from datasvc.runs.resources import RESOURCES
from datasvc.testing import FaultyStore
from tests.support import warm_python
from tests.support.gate import Gate

NEVER = 3600.0  # seconds between parts: only `flush` and `close` write
HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m",
    "../../etc/passwd",
    "a\nb\r\n",
    "\ud800",
    "\x00",
    "'; DROP TABLE runs; --",
    "{{7*7}}",
    "\u202eabc",
    "x" * 10_000,
]


@pytest.fixture
def repository(tmp_path):
    return Repository.create(str(tmp_path / "repo"))


def open_log(repository, name="digits", **options):
    return RunLog.open(repository, name, **{"flush_s": NEVER, **options})


def files_of(repository, log):
    return sorted(repository.storage.list(f"runs/{log.ref}"))


def read(repository, log, **options):
    return read_run(repository, log.name, log.id, **options)


def test_a_reader_finds_what_was_reported_while_the_run_goes_on_and_after_its_end(repository):
    with open_log(repository, config={"lr": 0.1}, data=["d@1"], world_size=4, facts={"why": "test"}) as log:
        for step in range(1, 4):
            log.report("step", step=step, loss=1 / step, unit="images")
        log.report("evaluation", step=3, accuracy=0.5)
        log.report("checkpoint", step=3, version="digits@1")
        assert log.flush()
        history = read(repository, log)
        assert (history.summary.state, history.summary.step, history.summary.world_size) == ("running", 3, 4)
        assert history.summary.latest["unit"] == "images"
        assert history.header["config"] == {"lr": 0.1}
        assert history.header["facts"] == {"why": "test"}
        assert history.series["loss"].steps.tolist() == [1, 2, 3]
        np.testing.assert_allclose(history.series["loss"].values, [1, 0.5, 1 / 3], rtol=1e-5)
        assert history.evaluation["accuracy"].values.tolist() == [0.5]
        assert [event.event for event in history.events] == ["evaluation", "checkpoint"]
        assert history.versions == ["digits@1"]
    ended = read(repository, log)
    assert ended.summary.state == "finished"
    assert ended.series["loss"].steps.tolist() == [1, 2, 3]
    assert ended.events == history.events
    json.dumps(ended.to_dict(), allow_nan=False)


def test_an_error_becomes_the_outcome(repository):
    log = open_log(repository)
    with pytest.raises(ZeroDivisionError), log:
        1 / 0  # noqa: B018
    summary = list_runs(repository)[0]
    assert (summary.state, summary.message) == ("failed", "ZeroDivisionError: division by zero")


def test_an_interrupt_is_no_failure(repository):
    log = open_log(repository)
    with pytest.raises(KeyboardInterrupt), log:
        raise KeyboardInterrupt
    assert list_runs(repository)[0].state == "interrupted"


def test_a_run_without_an_end_is_not_responding_after_some_heartbeats(repository):
    log = open_log(repository, heartbeat_s=10)
    log.flush()
    last_s = list_runs(repository)[0].last_s

    def state_after(age_s):
        return read_summary(repository.storage, log.name, log.id, last_s + age_s).state

    states = [state_after(age_s) for age_s in (0, 59, 61)]
    log.close()
    assert states == ["running", "running", "not responding"]
    assert state_after(1e6) == "finished"


def test_each_attempt_continues_the_run_and_replaces_repeated_steps(repository):
    first = open_log(repository)
    for step in range(1, 11):
        first.report("step", step=step, loss=1)
    first.report("evaluation", step=8, accuracy=0.8)
    first.report("evaluation", step=10, accuracy=1.0)
    first.close("interrupted", "signal 15")
    second = open_log(repository, run_id=first.id, parent="digits@1")
    second.report("evaluation", step=8, accuracy=0.9)  # it continues the state after step 8
    for step in range(9, 13):
        second.report("step", step=step, loss=2)
    second.close()
    history = read(repository, second)
    assert history.series["loss"].steps.tolist() == [*range(1, 13)]
    assert history.series["loss"].values.tolist() == [1] * 8 + [2] * 4
    assert history.evaluation["accuracy"].steps.tolist() == [8]
    assert history.evaluation["accuracy"].values.tolist() == [0.9]
    assert [event.attempt for event in history.events] == [1, 1, 2]
    assert (history.summary.num_attempts, len(list_runs(repository))) == (2, 1)
    assert history.header["parent"] == "digits@1"


def test_two_writers_of_one_run_do_not_disturb_each_other(repository):
    first = open_log(repository)
    second = open_log(repository, run_id=first.id)
    for step in range(1, 40):
        for log in (first, second):
            log.report("step", step=step, loss=step)
            log.report("note", who=id(log))
            assert log.flush()
    first.close()
    second.close()
    history = read(repository, first)
    assert history.series["loss"].steps.tolist() == [*range(1, 40)]
    assert len(history.events) == 2 * 39
    assert not history.problems
    assert history.summary.num_attempts == 2


def _write_as_fast_as_possible(url, pipe):
    log = RunLog.open(url, "digits", flush_s=NEVER)
    pipe.send(log.id)
    for step in range(1, 10_000):
        log.report("step", step=step, loss=step)
        log.report("note", step=step)
        assert log.flush()
        pipe.send(step)


@pytest.mark.parametrize("num_parts", [1, 8, 9, 10, 25, 73])
def test_a_killed_writer_leaves_a_log_with_everything_that_it_had_flushed(repository, warm_workers, num_parts):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    writer = multiprocessing.get_context("spawn").Process(
        target=_write_as_fast_as_possible, args=(repository.url, sender)
    )
    writer.start()
    run_id = receiver.recv()
    # Killed while it writes a later part or merges: the number of parts decides about where that is.
    acknowledged = [receiver.recv() for _ in range(num_parts)][-1]
    writer.kill()
    writer.join()
    history = read_run(repository, "digits", run_id)
    steps = history.series["loss"].steps.tolist()
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= acknowledged
    assert [event.facts["step"] for event in history.events] == steps
    assert not history.problems


def test_a_concurrent_reader_finds_every_event_at_any_time(repository):
    log = open_log(repository)
    log.flush()
    is_over = threading.Event()
    problems = []

    def read_often():
        num_seen = 0
        while not is_over.is_set():
            steps = [event.facts["step"] for event in read(repository, log).events]
            if steps != [*range(1, len(steps) + 1)] or len(steps) < num_seen:
                problems.append(steps)
            num_seen = len(steps)

    reader = threading.Thread(target=read_often)
    reader.start()
    for step in range(1, 200):
        log.report("note", step=step)
        log.flush()
    log.close()
    is_over.set()
    reader.join()
    assert problems == []


def test_following_a_run_returns_each_event_once_however_parts_are_replaced(repository):
    log = open_log(repository)
    cursor, steps, notes = "", [], []
    for step in range(1, 150):
        log.report("step", step=step, loss=step)
        log.report("note", step=step)
        log.flush()
        if step % 7 == 0 or step % 5 == 0:
            new = follow_run(repository, log.name, log.id, cursor)
            cursor = new.cursor
            steps += new.series["loss"].steps.tolist()
            notes += [event.facts["step"] for event in new.events]
    assert steps == notes == [*range(1, len(steps) + 1)]
    log.close()
    last = follow_run(repository, log.name, log.id, cursor)
    assert [event.facts["step"] for event in last.events] == [*range(len(steps) + 1, 150)]
    assert last.summary.state == "finished"
    assert follow_run(repository, log.name, log.id, last.cursor).events == []


def test_a_run_has_few_files_whatever_it_reports(repository):
    log = open_log(repository)
    for step in range(1, 301):
        log.report("step", step=step, loss=step, **{f"n{number}": step for number in range(50)})
        log.flush()
        assert len(files_of(repository, log)) <= 4  # header, most, recent, and what the latter has replaced
    history = read(repository, log)
    assert history.series["loss"].counts.sum() == 300
    log.close()
    assert len(files_of(repository, log)) == 3  # header, all, end
    assert read(repository, log).series["loss"].counts.sum() == 300


@pytest.mark.parametrize("steps_per_part", [1, 100, 4096])
def test_each_step_is_a_point_until_an_attempt_has_4096(repository, steps_per_part):
    num_steps = min(4096, 200 * steps_per_part)
    log = open_log(repository)
    for step in range(1, num_steps + 1):
        log.report("step", step=step, loss=step, **{f"n{number}": step for number in range(20)})
        if step % steps_per_part == 0:
            assert log.flush()
    assert log.flush()
    for _ in range(2):
        series = read(repository, log).series["loss"]
        assert series.steps.tolist() == series.values.tolist() == [*range(1, num_steps + 1)]
        log.close()


def test_a_long_attempt_combines_old_steps_and_has_no_more_points_than_its_bound(repository):
    log = open_log(repository)
    for step in range(1, 20_001):
        log.report("step", step=step, loss=step)
        if step % 250 == 0:
            assert log.flush()
    running = read(repository, log).series["loss"]
    assert running.counts.sum() == 20_000
    assert 2048 < len(running) <= 2 * 4096
    log.close()
    ended = read(repository, log).series["loss"]
    assert ended.counts.sum() == 20_000
    assert 2048 < len(ended) <= 4096


def test_frequent_events_are_thinned_and_rare_ones_stay(repository):
    log = open_log(repository)
    for step in range(20_000):
        log.report("note", step=step)
        if step == 5_000:
            log.report("stall", step=step)
    log.close()
    history = read(repository, log)
    events = history.events
    assert 400 < len(events) <= 1000
    (problem,) = history.problems
    assert problem.startswith(f"{20_001 - len(events)} events left out to keep the log small")
    assert events[-1].facts["step"] == 19_999
    assert [event.facts["step"] for event in events if event.event == "stall"] == [5_000]


def test_a_store_that_fails_costs_neither_steps_nor_events_once_it_answers_again(caplog):
    with FaultyStore() as store:
        repository = Repository.create(store.url)
        log = open_log(repository)
        assert log.flush()
        store.fail("write", "runs/*")
        for step in range(1, 20):
            log.report("step", step=step, loss=step)
            log.report("note", step=step)
            assert not log.flush()
        store.heal()
        assert log.flush()
        log.close()
        history = read(repository, log)
        assert history.series["loss"].counts.sum() == 19
        assert [event.facts["step"] for event in history.events] == [*range(1, 20)]
        messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(messages) == 2
        assert "the training continues" in messages[0]


def test_a_write_whose_answer_is_lost_is_not_repeated():
    with FaultyStore() as store:
        repository = Repository.create(store.url)
        log = open_log(repository)
        assert log.flush()
        store.fail("write", "runs/*.jsonl", times=1, effect="unanswered")
        store.fail("read", "runs/*.jsonl", times=1)
        log.report("note", step=1)
        log.flush()
        log.flush()
        log.close()
        history = read(repository, log)
        assert [event.facts["step"] for event in history.events] == [1]
        assert not history.problems


def test_a_store_that_never_answers_does_not_keep_the_program(caplog):
    with FaultyStore() as store:
        repository = Repository.create(store.url)
        log = open_log(repository)
        log.flush()
        store.fail("write", "runs/*")
        log.close(timeout_s=0.0)
        store.heal()
    assert "the end of the run log is not written" in caplog.text


def test_more_events_than_the_memory_holds_are_counted_as_lost(repository, monkeypatch):
    monkeypatch.setattr("datasvc.runs.run_log._MAX_QUEUED", 10)
    log = open_log(repository)
    log.flush()
    for step in range(15):
        log.report("note", step=step)
    log.close()
    history = read(repository, log)
    assert (len(history.events), history.summary.num_lost) == (10, 5)
    assert history.problems == ["5 events of the last attempt could not be written"]


def test_hostile_names_and_values_stay_text(repository):
    log = open_log(repository, config={text: text for text in HOSTILE}, facts={"object": object(), "deep": _deep()})
    for text in HOSTILE:
        log.report(text, value=text, **{text: [text, {text: object()}]})
        log.report("step", step=1, **{text: 1.0})
    log.report("step", step="1", loss=1)
    log.report("step", step=1 << 70, loss=1)
    log.report("step", step=True, loss=1 << 2000)
    log.report("huge", values=["x" * 4000] * 1000)
    log.close(message=HOSTILE[0])
    history = read(repository, log)
    assert not history.problems
    assert history.summary.message == HOSTILE[0]
    names = [event.event for event in history.events]
    assert names[:2] == HOSTILE[:2]
    assert all(name.startswith("00000001.") for name in files_of(repository, log))
    json.dumps(history.to_dict(), allow_nan=False, ensure_ascii=False).encode()


def _deep():
    value = []
    for _ in range(10_000):
        value = [value]
    return value


def test_a_damaged_part_is_reported_and_the_rest_is_read(repository):
    logs = [open_log(repository)]
    logs += [open_log(repository, run_id=logs[0].id) for _ in range(2)]
    for step, log in enumerate(logs):
        log.report("note", step=step)
        log.flush()
    path = newest_part(repository, logs[1], attempt=2)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    history = read(repository, logs[0])
    assert [event.facts["step"] for event in history.events] == [0, 2]
    assert len(history.problems) == 1
    assert "is corrupt" in history.problems[0]
    for log in logs:
        log.close()


def test_lists_have_the_newest_runs_first_and_read_one_file_of_each(tmp_path):
    with FaultyStore() as store:
        repository = Repository.create(store.url)
        logs = [open_log(repository, name) for name in ("a", "b", "a")]
        for number, log in enumerate(logs):
            log.report("step", step=number + 1, loss=1)
            log.close()
        before = len(store.requests)
        listed = list_runs(repository)
        reads = [path for operation, path in store.requests[before:] if operation == "read"]
        assert len(reads) == 3
        assert sorted(run.ref for run in listed) == sorted(log.ref for log in logs)
        assert [run.id for run in listed] == sorted((log.id for log in logs), reverse=True)
        assert len(list_runs(repository, last=2)) == 2
        assert {run.name for run in list_runs(repository, "a")} == {"a"}
        assert list_runs(repository, "unknown") == []


def test_a_reference_is_a_name_or_a_name_and_an_identifier(repository):
    log = open_log(repository)
    log.close()
    assert resolve_run(repository, "digits") == resolve_run(repository, log.ref) == ("digits", log.id)
    with pytest.raises(NotFoundError, match=log.ref):
        resolve_run(repository, "digits/20000101-000000-aaaaaa")
    with pytest.raises(NotFoundError, match="it has digits"):
        resolve_run(repository, "other")
    for ref in ("../x", "digits/..", "digits/", "Digits"):
        with pytest.raises(ConfigError):
            resolve_run(repository, ref)


def test_invalid_arguments_are_refused(repository):
    with pytest.raises(ConfigError, match="valid name of a run"):
        open_log(repository, "../x")
    with pytest.raises(ConfigError, match="identifier of a run"):
        open_log(repository, run_id="../x")
    with pytest.raises(ConfigError, match="outcome"):
        open_log(repository).close("done")
    with pytest.raises(ConfigError, match="cursor"):
        follow_run(repository, "digits", "20000101-000000-aaaaaa", "x")


def test_a_program_that_forgets_to_close_its_log_is_interrupted(repository):
    program = (
        "import sys; from datasvc.runs import RunLog\n"
        "log = RunLog.open(sys.argv[1], 'digits', flush_s=3600)\nlog.report('note', x=1)"
    )
    subprocess.run([warm_python.command(), "-c", program, repository.url], check=True)
    (run,) = list_runs(repository)
    assert (run.state, run.message) == ("interrupted", "the program ended without closing the log")
    assert len(read_run(repository, run.name, run.id).events) == 1


def test_a_forked_child_does_not_end_the_log_of_its_parent(repository):
    log = open_log(repository)
    log.flush()
    child = os.fork()
    if child == 0:
        log.close("failed")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert list_runs(repository)[0].state == "running"
    log.close()
    assert list_runs(repository)[0].state == "finished"


def test_a_log_of_large_events_stays_readable_after_its_end(repository):
    log = open_log(repository)
    for step in range(1400):
        log.report("note", step=step, text=["x" * 4000] * 14)
        if step % 100 == 0:
            log.flush()
    log.report("evaluation", step=1400, accuracy=0.5)
    log.close()
    history = read(repository, log)
    steps = [event.facts["step"] for event in history.events]
    assert len(steps) > 100
    assert steps[-2:] == [1399, 1400]
    assert history.evaluation["accuracy"].values.tolist() == [0.5]


class _Failing(dict):
    """A dict that changes while it is read, as one that the program goes on to use."""

    def items(self):
        raise RuntimeError("dictionary changed size during iteration")

    def __repr__(self):
        raise RuntimeError("dictionary changed size during iteration")


def test_a_value_that_fails_becomes_text_and_the_log_goes_on(repository):
    log = open_log(repository)
    log.report("note", value=_Failing(), other=1)
    log.report("step", step=1, loss=0.5, value=_Failing())
    assert log.flush()
    log.report("note", other=2)
    log.close()
    history = read(repository, log)
    assert [event.facts["other"] for event in history.events] == [1, 2]
    assert history.events[0].facts["value"] == "<_Failing>"
    assert history.summary.latest == {"step": 1, "loss": 0.5, "value": "<_Failing>"}


def test_an_event_that_cannot_be_collected_is_counted_as_lost(repository, monkeypatch, caplog):
    def fail(time_s, event, facts):
        raise RuntimeError(event)

    log = open_log(repository)
    monkeypatch.setattr("datasvc.runs.collector.make_event", fail)
    log.report("note")
    assert log.flush()
    monkeypatch.undo()
    log.report("note", text="stays")
    log.close()
    assert log.num_lost == 1
    assert "1 event could not be written to the run log" in caplog.text
    history = read(repository, log)
    assert [event.facts for event in history.events] == [{"text": "stays"}]
    assert history.summary.num_lost == 1


def test_a_defect_of_the_log_ends_neither_the_program_nor_its_waiting(repository, monkeypatch, caplog):
    log = open_log(repository)
    log.flush()
    monkeypatch.setattr(log._collector, "compact", None)
    log.report("note")
    assert not log.flush()
    log.close()
    assert "nothing more is written to the run log" in caplog.text


def test_a_step_with_very_many_numbers_keeps_the_first_ones(repository):
    log = open_log(repository)
    log.report("step", step=1, **{f"n{number}": number for number in range(1025)})
    log.close()
    history = read(repository, log)
    assert list(history.series) == [f"n{number}" for number in range(1024)]


def test_lists_show_the_step_of_a_run_with_very_many_facts(repository):
    log = open_log(repository)
    facts = {f"fact{number}": "x" * 50 for number in range(500)}
    log.report("step", **facts, step=7, loss=0.5, progress=0.25)
    log.close()
    (run,) = list_runs(repository)
    assert run.step == 7
    assert (run.latest["loss"], run.latest["progress"], run.latest["fact0"]) == (0.5, 0.25, "x" * 50)
    assert len(run.latest) < 300


def test_a_list_of_runs_has_what_slows_a_run_down(repository):
    with open_log(repository) as log:
        assert log.flush()
        (run,) = list_runs(repository)
        assert (run.num_stalls, run.last_stall_s, run.stragglers, run.verdict) == (0, None, (), "")
        for part in range(2):
            log.report("stall", step=part, wait_s=2.5)
            log.report("ranks", rank=[0, 1], stragglers=[part] * 20)
            log.report("diagnosis", verdict=f"starved by {part}" + "x" * 2000)
            assert log.flush()
        (run,) = list_runs(repository)
        assert (run.num_stalls, run.stragglers) == (2, [1] * 8)
        assert run.last_stall_s == pytest.approx(run.last_s, abs=60)
        assert run.verdict.startswith("starved by 1")
        assert len(run.verdict) == 1000
        log.report("ranks", stragglers="all")
        log.report("diagnosis", verdict=None)
    (run,) = list_runs(repository)
    assert (run.num_stalls, run.stragglers, run.verdict) == (2, [], "")
    assert json.loads(json.dumps(run.to_dict()))["stragglers"] == []


def test_numbers_of_other_libraries_are_numbers(repository):
    with open_log(repository, data="digits@3") as log:
        log.report("step", step=np.int64(1), loss=torch.tensor(0.5), rate=np.float32(0.25))
        log.report("evaluation", event=1.0)
    history = read(repository, log)
    assert history.series["loss"].values.tolist() == [0.5]
    assert history.series["rate"].steps.tolist() == [1]
    assert history.summary.data == ["digits@3"]
    assert history.summary.step == 1
    assert dict(history.events[0].facts) == {"event": 1.0}


@pytest.mark.parametrize("interval", [0, -1, float("inf"), float("nan")])
def test_an_interval_at_which_nothing_would_be_written_is_refused(repository, interval):
    with pytest.raises(ConfigError, match="heartbeat_s"):
        RunLog.open(repository, "digits", heartbeat_s=interval)


def test_an_event_after_the_end_is_lost_and_flush_does_not_wait(repository):
    log = open_log(repository)
    log.close()
    log.report("note", text="late")
    assert log.num_lost == 1
    assert log.flush(timeout_s=1e6)


@pytest.mark.parametrize("timeout_s", [-1, 0, float("nan"), float("inf"), 1e300])
def test_a_time_to_wait_that_is_none_is_refused_by_follow(tmp_path, timeout_s):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    with pytest.raises(ConfigError, match=r"timeout_s is .*; expected seconds above 0"):
        repo.runs.follow("cnn", "", timeout_s=timeout_s)


def newest_part(repository, log, attempt=1):
    *_, name = [name for name in files_of(repository, log) if name.startswith(f"{attempt:08d}.0")]
    return Path(repository.storage.location(f"runs/{log.ref}"), name)


def test_a_run_whose_newest_part_is_damaged_is_not_called_running(repository):
    log = open_log(repository)
    log.report("step", step=1, loss=1.0)
    assert log.flush()
    log.close()
    newest_part(repository, log).write_bytes(b"damaged")
    for summary in (*list_runs(repository), read(repository, log).summary):
        assert summary.state == "not responding"
        assert "is corrupt" in summary.message


def test_a_part_with_an_impossible_time_is_damaged(repository):
    with open_log(repository) as log:
        pass
    part = newest_part(repository, log)
    head, _ = part.read_bytes().splitlines()
    body = json.dumps(json.loads(head) | {"time": 1e18}).encode() + b"\n"
    part.write_bytes(body + json.dumps({"checksum": digest_of(body)}).encode() + b"\n")
    assert "time of a part is 1e+18" in list_runs(repository)[0].message


def test_a_step_that_is_reported_twice_is_one_point(repository):
    with open_log(repository) as log:
        for step, loss in ((1, 1.0), (2, 2.0), (2, 3.0), (3, 4.0)):
            log.report("step", step=step, loss=loss)
    series = read(repository, log).series["loss"]
    assert series.steps.tolist() == [1, 2, 3]
    assert series.values.tolist() == [1.0, 3.0, 4.0]


@pytest.mark.slow
def test_a_history_is_a_table_a_plot_and_html(repository):
    with open_log(repository) as log:
        for step in range(1, 4):
            log.report("step", step=step, loss=1 / step)
        log.report("evaluation", step=3, accuracy=0.5)
    history = read(repository, log)
    rows = history.to_arrow().to_pylist()
    reported = [row for row in rows if row["name"] not in RESOURCES]
    assert [(row["kind"], row["name"], row["step"]) for row in reported] == [
        *(("step", "loss", step) for step in (1, 2, 3)),
        ("evaluation", "accuracy", 3),
    ]
    assert history.to_pandas().shape == (len(rows), 8)
    assert log.ref in history._repr_html_()
    assert "<svg" in history._repr_html_()
    assert history.plot("accuracy").get_ylabel() == "accuracy"
    with pytest.raises(ConfigError, match=r"its curves are: loss, .*accuracy"):
        history.plot("rate")


def test_long_names_with_the_same_start_are_two_curves(repository):
    log = open_log(repository)
    log.report("step", step=1, **{"x" * 128 + end: value for end, value in {"a": 1.0, "b": 2.0}.items()})
    log.close()
    history = read(repository, log)
    reported = {name: series for name, series in history.series.items() if name not in RESOURCES}
    assert [series.values.tolist() for series in reported.values()] == [[1.0], [2.0]]
    assert all(len(name) == 128 for name in reported)


def test_following_a_run_on_a_store_that_does_not_answer_says_so_and_goes_on_later(tmp_path, monkeypatch):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    with repo.runs.start("cnn") as log:
        log.report("step", step=1, loss=1.0)
    storage, gate = repo.repository.storage, Gate()
    monkeypatch.setattr(storage, "list", gate.before(storage.list))
    with pytest.raises(UnavailableError, match=r"/repo/runs has not answered for 0\.001 s; .* same cursor"):
        repo.runs.follow("cnn", "", timeout_s=0.001)
    gate.open()
    assert repo.runs.follow("cnn", "", timeout_s=600).series["loss"].steps.tolist() == [1]
    with pytest.raises(NotFoundError, match="it has cnn"):
        repo.runs.follow("other", "", timeout_s=600)
