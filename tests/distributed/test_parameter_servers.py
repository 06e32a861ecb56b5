"""The recipe with parameter servers: workers are lost, servers are lost, signals come; the ledger stays proven."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import datasvc
from datasvc.ledger.audit import audit_folders
from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

# One rank kills or stops itself, before it does something for the n-th time; or rank 0 has its launcher told to end.
# WAKE: rank 0 continues the stopped rank when it reports that it is lost.
PROGRAM = """
import os, signal
from datasvc.trainer.recipes.layouts import shard
from datasvc.trainer.recipes.reporting.events import JsonEvents
from datasvc.trainer.recipes.servers import job
from datasvc.trainer.servers.parameter_shard import ParameterShard
from datasvc.trainer.servers.worker_client import WorkerClient

rank, action, number = os.environ["ACT"].split(":")
owner, name, pid, sent = {
    "push": (WorkerClient, "push", os.getpid(), signal.SIGKILL),
    "stop-push": (WorkerClient, "push", os.getpid(), signal.SIGSTOP),
    "recompute": (shard, "_recompute", os.getpid(), signal.SIGKILL),
    "apply": (ParameterShard, "apply", os.getpid(), signal.SIGKILL),
    "stop-apply": (ParameterShard, "apply", os.getpid(), signal.SIGSTOP),
    "report": (JsonEvents, "report", os.getppid(), signal.SIGTERM),
}[action]
real, left = getattr(owner, name), int(number)
def act(self, *args, **options):
    global left
    left -= 1
    if left == 0:
        os.kill(pid, sent)
    return real(self, *args, **options)
if os.environ["RANK"] == rank:
    setattr(owner, name, act)

# All workers have a part before any is pushed: the one to lose has one, however late it starts.
real_open, real_grant = job.open_store, WorkerClient.next_grant
def open_store(placement):
    global store
    store = real_open(placement)
    return store
def next_grant(self):
    grant = real_grant(self)
    if not store.check([own]):
        store.set(own, "")
        if acts:
            store.set("pid", str(os.getpid()))
        store.wait([f"granted/{worker}" for worker in range(2, 5)])
    return grant
own, acts = "granted/" + os.environ["RANK"], os.environ["RANK"] == rank
if action == "stop-push" and os.environ["RANK"] == "0":
    report = JsonEvents.report
    def report_and_wake(self, event, **facts):
        report(self, event, **facts)
        if event == "lost" and "WAKE" in os.environ:
            os.kill(int(store.get("pid")), signal.SIGCONT)
    JsonEvents.report = report_and_wake
if action in ("push", "stop-push"):
    job.open_store, WorkerClient.next_grant = open_store, next_grant

from datasvc.trainer.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("servers") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return repository


def run(repository, name, sync, *options, ranks=5, servers=2, act="9:apply:0"):
    """Run the recipe; returns its exit status, events and standard error."""
    # fmt: off
    words = [
        sys.executable, "-m", "datasvc.trainer.launch", "-np", ranks, "--no-prefix",
        *(("--servers", servers) if servers else ()),
        warm_python.command(), "-c", PROGRAM,
        "--data", "digits@1", "--repo", repository.url, "--name", name, "--size", 32, "--resize", 32,
        "--scale", 0.8, 1, "--flip", 0, "--epochs", 2, "--batch-size", 32, "--sync", sync, *options,
    ]
    # fmt: on
    environment = {**os.environ, "ACT": act}
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=120
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"], done.stderr


def test_the_job_goes_on_without_a_lost_worker_and_each_sample_counts_once(repository, tmp_path):
    status, events, error = run(repository, "worker", "ssp:3", "--ledger", tmp_path, act="3:push:1")
    assert status == 0, error
    assert "the job goes on without rank 3, which was killed by SIGKILL" in error
    assert [event["worker"] for event in events if event["event"] == "lost"] == [1]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 29))
    found = audit_folders([tmp_path])
    assert found.is_proven
    assert [epoch.returned for epoch in found.epochs] == [32, 0]
    entry = describe_model(repository, "worker").entry
    execution = entry["execution"]
    assert (execution["consistency"], execution["topology"], execution["sync"]) == ("bounded", "centralised", "ssp:3")
    assert execution["layout"] == {"data": 3, "server": 2}
    assert entry["metrics"]["val_accuracy"] > 0.5
    assert datasvc.open(repository.url).models.find("execution.topology = 'centralised'")


@pytest.mark.parametrize("wakes", [False, True])
def test_a_stopped_worker_is_dropped_and_when_it_continues_it_ends_with_an_error(
    repository, tmp_path, monkeypatch, wakes
):
    if wakes:
        monkeypatch.setenv("WAKE", "1")
    options = ("--ledger", tmp_path, "--lost-after", 3)
    status, events, error = run(repository, "late" if wakes else "silent", "ssp:3", *options, act="3:stop-push:1")
    assert status == 0, error
    assert [event["worker"] for event in events if event["event"] == "lost"] == [1]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 29))
    found = audit_folders([tmp_path])
    assert found.is_proven
    assert [epoch.returned for epoch in found.epochs] == [32, 0]
    if wakes:
        assert "this worker, rank 3, was dropped: it gave no sign of life for 3 s, and the job goes on" in error
    else:
        assert "the job is over: terminating rank 3, which gave no sign of life" in error


@pytest.mark.parametrize("server", [0, 1])
def test_a_stopped_server_ends_the_job_with_an_error_that_names_it(repository, server):
    act = f"{server}:stop-apply:8"
    status, _, error = run(repository, f"silent-{server}", "ssp:3", "--lost-after", 3, act=act)
    assert status == 1
    assert f"server {server} (rank {server}) is lost, without a sign of life for 3 s" in error


def test_the_loss_of_a_server_names_it_and_the_run_continues_its_newest_version(repository, tmp_path):
    options = ("--checkpoint-every", 4, "--ledger", tmp_path)
    status, events, error = run(repository, "server", "async", *options, act="1:apply:36")
    assert status == 128 + 9
    assert "rank 1 was the first to fail: it was killed by SIGKILL" in error
    newest = describe_model(repository, "server").entry["step"]
    assert newest in {4, 8}
    status, events, error = run(repository, "server", "async", *options)
    assert status == 0, error
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(newest + 1, 29))
    assert audit_folders([tmp_path]).is_proven


def test_a_signal_saves_a_whole_number_of_steps_and_ends_all_processes(repository):
    status, events, error = run(repository, "stopped", "ssp:2", act="0:report:12")
    assert status == 128 + 15, error
    assert events[-1]["event"] == "stopped"
    entry = describe_model(repository, "stopped").entry
    assert entry["step"] * 96 == entry["data"][0]["spans"][-1]["stop"][1]


def test_with_bound_0_a_run_has_the_weights_of_one_without_servers(repository):
    assert run(repository, "whole", "bsp", "--max-steps", 3, ranks=2, servers=0)[0] == 0
    status, _, error = run(repository, "served", "ssp:0", "--max-steps", 3, ranks=3, servers=1)
    assert status == 0, error
    opened = datasvc.open(repository.url)
    found, expected = (opened.models.restore(f"{name}@1").state for name in ("served", "whole"))
    for part in ("step", "loader"):
        assert found[part] == expected[part]
    for name, weight in expected["model"].items():
        assert (found["model"][name] - weight).abs().max() < 1e-6


def test_workers_compute_activations_again(repository):
    """The worker that does so first is lost by it."""
    options = ("--model", "resnet18", "--statistics", "recompute", "--recompute", "--max-steps", 3)
    status, events, error = run(repository, "less-memory", "ssp:3", *options, act="3:recompute:1")
    assert status == 0, error
    assert [event["worker"] for event in events if event["event"] == "lost"] == [1]


def test_servers_and_sync_need_each_other(repository):
    status, _, error = run(repository, "none", "async", ranks=2, servers=0)
    assert status == 2
    assert "start the job with datasvc-run -np N --servers M" in error
    status, _, error = run(repository, "none", "bsp", ranks=2, servers=1)
    assert status == 2
    assert "leave out --servers" in error
