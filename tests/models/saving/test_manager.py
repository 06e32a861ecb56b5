"""A model that a run saves in the background, in a world of one."""

import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import BusyError, ConfigError, NotFoundError, UnavailableError
from datasvc.models import DataUse, describe_model, model_log, restore
from datasvc.models.saving import manager
from datasvc.models.saving.manager import CheckpointManager
from datasvc.models.saving.queue import SaveHandle, SaveQueue
from datasvc.models.saving.save_policy import SaveScheduler
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.saving.writer import VersionWriter
from datasvc.models.tensors import codec
from datasvc.models.tensors.tensor_table import read_table
from datasvc.repository.objects.objects import Objects
from datasvc.testing import FakeClock
from tests.support.gate import Gate
from tests.support.threads import waits_in


@pytest.fixture
def repo(repository):
    return datasvc.open(repository.url)


@pytest.fixture
def gate(monkeypatch):
    """Where writes of objects wait."""
    gate = Gate()
    monkeypatch.setattr(Objects, "write", gate.before(Objects.write))
    yield gate
    gate.open()


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by 2 s for each copy to the host, and by 1 s when the write of one is queued."""
    clock, copy, submit = FakeClock(), HostBuffer.copy, SaveQueue.submit
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(manager, "SaveScheduler", partial(SaveScheduler, now=clock))
    monkeypatch.setattr(HostBuffer, "copy", lambda *args: clock.advance(2) or copy(*args))
    monkeypatch.setattr(SaveQueue, "submit", lambda *args: clock.advance(1) or submit(*args))
    return clock


def test_what_changes_after_a_save_does_not_reach_it(repo, gate):
    weight, array = torch.zeros(50_000), np.zeros(9)
    rates, use = [0.1], DataUse("d@1", "train", {"epoch": 0, "position": 0})
    config, metrics = {"betas": [0.9]}, {"loss": 1.0}
    with repo.models.manager("m") as model:
        handle = model.save(
            {"w": weight, "a": array, "rates": rates}, step=1, data=[use], config=config, metrics=metrics
        )
        assert gate.begun.wait(30)
        weight += 1
        array += 1
        rates.append(0.2)
        use.state["position"] = 99
        config["betas"].append(0.5)
        metrics["loss"] = 2.0
        assert not handle.done()
        gate.open()
        assert str(handle.result()) == "m@1"
    found = repo.models.restore("m@1")
    assert not found.state["w"].any()
    assert not found.state["a"].any()
    assert found.state["rates"] == [0.1]
    assert found.entry["data"][0]["state"]["position"] == 0
    assert (found.entry["config"], found.entry["metrics"]) == ({"betas": [0.9]}, {"loss": 1.0})


def test_a_model_tells_what_saving_cost_the_training(repo, clock):
    with repo.models.manager("m", every=2) as model:
        assert model.cost.share == 0
        for step in range(1, 6):
            clock.advance(10)
            if model.should_save(step):
                assert model.save({"w": torch.zeros(50_000)}, step=step).stall_s == 2
        assert (model.cost.stall_s, model.cost.training_s, model.cost.share) == (6, 56, 6 / 56)
    assert repo.models.describe("m").entry["duration"]["stall_s"] == 2


def overhead_after_a_step(model, clock):
    """Return what is owed after a step of 100 s, which pays for 1 s."""
    clock.advance(100)
    model.should_save(2)
    return model._scheduler.overhead_s


@pytest.fixture
def slow_device(monkeypatch):
    """Copies to the host that a device is said to have taken 1000 s for."""
    monkeypatch.setattr(HostCopies, "wait", lambda _: 1000.0)


def without_a_thread(queue):
    """Return the queue's `submit` where the system has no thread left to save in; the save itself finds some."""
    submit, write = queue.submit, queue._write

    def start(_):
        raise RuntimeError("can't start new thread")

    def submit_inline(task):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            patch.setattr(queue, "_write", lambda task: (patch.undo(), write(task))[1])
            submit(task)

    return submit_inline


@pytest.mark.usefixtures("slow_device")
@pytest.mark.parametrize("how", ["waits", "has no thread"])
def test_a_save_that_blocks_until_it_is_committed_costs_all_that_time_and_a_copy_within_it_nothing_more(
    repo, monkeypatch, clock, how
):
    write = VersionWriter.write
    monkeypatch.setattr(VersionWriter, "write", lambda *args: clock.advance(5) or write(*args))
    with repo.models.manager("m", max_stall=0.01) as model:
        if how == "has no thread":
            monkeypatch.setattr(model._queue, "submit", without_a_thread(model._queue))
        assert model.save({"w": torch.ones(50_000)}, step=1, wait=how == "waits").done()
        assert model.cost.stall_s == repo.models.describe("m").entry["duration"]["total_s"] == 8
        assert overhead_after_a_step(model, clock) == 7


def test_a_save_that_blocks_and_fails_costs_the_time_all_the_same(repo, gate, clock, monkeypatch):
    real = SaveHandle.result

    def result(handle):
        clock.advance(5)
        gate.open()
        return real(handle)

    monkeypatch.setattr(SaveHandle, "result", result)
    gate.error = UnavailableError("gone")
    with repo.models.manager("m", max_stall=0.01) as model:
        with pytest.raises(UnavailableError, match="gone"):
            model.save({"w": torch.ones(50_000)}, step=1, wait=True)
        assert model.cost.stall_s == 8
        assert overhead_after_a_step(model, clock) == 7
        assert model.cost.training_s == 108, "the wait is no part of the next step"


@pytest.mark.usefixtures("slow_device")
def test_a_copy_that_a_device_makes_beside_the_training_is_owed_once(repo, gate, clock):
    with repo.models.manager("m", max_stall=0.01) as model:
        model.save({"w": torch.ones(50_000)}, step=1)
        assert gate.begun.wait(30)
        assert overhead_after_a_step(model, clock) == 3 + 1000 - 1
        gate.open()


def test_several_saves_queue_in_two_buffers_and_each_keeps_its_own_bytes(repo, gate):
    """The third finds both buffers in use and waits for the first to be written."""
    weight = torch.zeros(50_000)
    model = repo.models.manager("m")
    for step in (1, 2):
        model.save({"w": weight.fill_(step)}, step=step)
    third = threading.Thread(target=lambda: model.save({"w": torch.full((50_000,), 3.0)}, step=3))
    third.start()
    assert waits_in(third, threading.Condition.wait)
    gate.open()
    third.join()
    model.close()
    assert [(restore(repo.repository, f"m@{n}").state["w"] == n).all().item() for n in (1, 2, 3)] == [True] * 3
    assert [version.entry["parent"] for version in model_log(repo.repository, "m")] == [None, "m@1", "m@2"]


def test_a_difference_to_a_copy_that_is_overwritten_meanwhile_restores_all_the_same(repo, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(300_000)
    wanted, real = [], codec.try_encodings
    with repo.models.manager("m") as model:

        def try_encodings(content, word, base=None):
            base_state = model._writer._base_state
            if base_state is not None:
                base_state.tensors["w"].fill_(99.0)  # as the next save does, once this one has looked at them
            return real(content, word, base)

        monkeypatch.setattr(codec, "try_encodings", try_encodings)
        for step in range(1, 7):
            weight = weight * (1 + 1e-6)
            wanted.append(weight.clone())
            model.save({"w": weight}, step=step, wait=True)
    (record,) = read_table(repo.repository.objects, repo.models.describe("m@3").tensors)
    assert len(record.chunks[0].chain) == 3
    for number, expected in enumerate(wanted, start=1):
        assert torch.equal(repo.models.restore(f"m@{number}").state["w"], expected)


def test_an_overlap_may_be_refused(repo, gate):
    with repo.models.manager("m", overlap="refuse") as model:
        model.save({"w": torch.ones(50_000)}, step=1)
        with pytest.raises(BusyError, match="the save of step 1 is still running"):
            model.save({"w": torch.ones(50_000)}, step=2)
        gate.open()
        model.wait()
        model.save({"w": torch.ones(3)}, step=3, wait=True)
        assert str(model.version) == "m@2"


def test_a_save_that_fails_in_the_background_is_said_by_the_next_and_leaves_nothing(repo, gate):
    gate.error = UnavailableError("the disk is full")
    gate.open()
    model = repo.models.manager("m")
    model.save({"w": torch.ones(50_000)}, step=1)
    model._queue.finish()
    with pytest.raises(UnavailableError, match=r"the save of step 1 failed: .*the disk is full"):
        model.save({"w": torch.ones(50_000)}, step=2)
    with pytest.raises(NotFoundError):
        repo.models.restore("m")
    gate.error = None
    model.save({"w": torch.ones(50_000)}, step=3, wait=True)
    model.close()
    assert repo.models.describe("m").entry["step"] == 3
    gate.error = UnavailableError("the disk is full")
    with pytest.raises(UnavailableError, match="the save of step 4 failed"), repo.models.manager("m") as model:
        model.save({"w": torch.zeros(50_000)}, step=4)


def test_a_value_that_cannot_be_stored_is_refused_at_once_by_name(repo):
    with repo.models.manager("m") as model:
        with pytest.raises(ConfigError, match="state value f is a function"):
            model.save({"f": lambda: 0}, step=1)
        with pytest.raises(ConfigError, match=r"'sparse' .*cannot be stored"):
            model.save({"sparse": torch.eye(3).to_sparse()}, step=1)
        with pytest.raises(ConfigError, match="as rank_state="):
            model.save({"rank_state": 1}, step=1)
    assert repo.models.names() == []


def test_a_rank_s_own_state_comes_back_and_what_is_saved_next_continues_what_was_restored(repo):
    with repo.models.manager("m") as model:
        model.save({"w": torch.ones(3)}, rank_state={"random": torch.arange(4), "n": (1, 2)}, step=1, wait=True)
    with repo.models.manager("branch") as model:
        state = model.restore("m@1").state
        assert state["rank_state"][0]["n"] == (1, 2)
        assert state["rank_state"][0]["random"].tolist() == [0, 1, 2, 3]
        model.save({"w": torch.zeros(3)}, step=2, wait=True)
        with pytest.raises(NotFoundError, match="no version 7"):
            model.restore("m@7")
    assert repo.models.describe("branch").entry["parent"] == "m@1"


def test_a_run_that_has_no_version_yet_begins_with_the_default_and_only_then(repo):
    with repo.models.manager("m") as model:
        assert model.restore(default=None) is None
        assert model.restore("m@prod", default=7) == 7  # the model of the reference has no version
        with pytest.raises(NotFoundError, match="no model 'm'"):
            model.restore()
        model.save({"w": torch.ones(3)}, step=1, wait=True)
        assert model.restore(default=None).version == repo.models.resolve("m@1")
        for missing in ("m@7", "m@prod"):
            with pytest.raises(NotFoundError):
                model.restore(missing, default=None)
        with pytest.raises(ConfigError, match="not a valid name"):
            model.restore("m@", default=None)


def test_a_signal_makes_the_run_save_and_stop_and_its_handler_comes_back(repo):
    before = signal.getsignal(signal.SIGTERM)
    steps = []
    with repo.models.manager("m", every=100, grace="60s") as model:
        for step in range(1, 10):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            if model.should_save(step):
                model.save({"w": torch.full((3,), float(step))}, step=step)
                steps.append(step)
            if model.stop_signal:
                break
    assert (steps, model.stop_signal) == ([4], signal.SIGTERM)
    assert repo.models.describe("m").entry["step"] == 4
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_a_pace_a_run_saves_when_it_wants_to(repo):
    with repo.models.manager("m") as model:
        assert not any(model.should_save(step) for step in range(1, 50))


def test_what_is_restored_while_a_save_goes_on_is_what_the_next_one_continues(repo, gate):
    gate.open()
    repo.models.save("other", {"w": torch.zeros(3)}, step=1)
    gate.close()
    with repo.models.manager("m") as model:
        model.save({"w": torch.ones(50_000)}, step=1)
        restoring = threading.Thread(target=lambda: model.restore("other"))
        restoring.start()
        assert waits_in(restoring, threading.Condition.wait)
        gate.open()
        restoring.join()
        model.save({"w": torch.zeros(50_000)}, step=2)
    assert [version.entry["parent"] for version in model_log(repo.repository, "m")] == [None, "other@1"]


def test_after_a_signal_the_last_save_is_not_held_back_by_one_that_failed_before(repo, gate, caplog):
    gate.error = UnavailableError("the disk is full")
    gate.open()
    with repo.models.manager("m", grace="60s") as model:
        model.save({"w": torch.ones(50_000)}, step=1)
        model._queue.finish()
        gate.error = None
        signal.raise_signal(signal.SIGTERM)
        assert model.should_save(2)
        model.save({"w": torch.ones(50_000)}, step=2)
    assert repo.models.describe("m").entry["step"] == 2
    assert "the save of step 1 failed: the disk is full" in caplog.text


def test_a_run_may_go_on_after_a_save_that_failed_and_hears_at_the_end_if_the_last_one_did(repo, gate, caplog):
    gate.error = UnavailableError("the disk is full")
    gate.open()
    with repo.models.manager("m", failures="log") as model:
        failed = model.save({"w": torch.ones(50_000)}, step=1)
        failed.wait()
        assert "the disk is full" in str(failed.error)
        gate.error = None
        model.save({"w": torch.ones(50_000)}, step=2)
    assert "the save of step 1 failed: the disk is full" in caplog.text
    assert repo.models.describe("m").entry["step"] == 2
    gate.error = UnavailableError("the disk is full")
    with (
        pytest.raises(UnavailableError, match="the save of step 3 failed"),
        repo.models.manager("m", failures="log") as model,
    ):
        model.save({"w": torch.zeros(50_000)}, step=3)


def test_a_signal_that_came_after_the_last_step_does_what_it_would_have_done(repo, gate):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        model = repo.models.manager("m", grace="60s")
        model.save({"w": torch.ones(50_000)}, step=1)
        signal.raise_signal(signal.SIGTERM)
        gate.open()
        model.close()
        assert heard == [signal.SIGTERM]
        assert repo.models.describe("m").entry["step"] == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_save_that_is_interrupted_before_its_turn_is_told_once_and_the_next_one_works(repo, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    with repo.models.manager("m") as model:
        with monkeypatch.context() as patch:
            patch.setattr(model._queue, "wait_for_slot", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.save({"w": torch.ones(3)}, step=1)
        with pytest.raises(ConfigError, match=r"metric 'loss' is 'low'"):
            model.save({"w": torch.ones(3)}, step=2, metrics={"loss": "low"})
        model.save({"w": torch.ones(3)}, step=3, wait=True)
    assert repo.models.describe("m").version == 1


def test_settings_that_mean_nothing_are_refused_and_leave_no_handler(repo):
    before = signal.getsignal(signal.SIGTERM)
    for settings in (
        {"codec": "zip"},
        {"every": 0},
        {"overlap": "drop"},
        {"failures": "hide"},
        {"grace": "soon"},
        {"max_stall": "many"},
    ):
        with pytest.raises(ConfigError):
            repo.models.manager("m", **settings)
    with pytest.raises(ConfigError):
        CheckpointManager(repo.repository, "no/name")
    assert signal.getsignal(signal.SIGTERM) == before


def test_two_jobs_that_save_to_one_name_both_land(repo):
    with repo.models.manager("m") as first, repo.models.manager("m") as second:
        for step in (1, 2, 3):
            first.save({"w": torch.full((20_000,), float(step))}, step=step, message="first")
            second.save({"w": torch.full((20_000,), -float(step))}, step=step, message="second")
    landed = [(version.entry["message"], version.entry["step"]) for version in model_log(repo.repository, "m")]
    assert sorted(landed) == [(job, step) for job in ("first", "second") for step in (1, 2, 3)]
    for number, (job, step) in enumerate(landed, start=1):
        expected = float(step) if job == "first" else -float(step)
        assert (repo.models.restore(f"m@{number}").state["w"] == expected).all()
    assert describe_model(repo.repository, "m").version == 6
