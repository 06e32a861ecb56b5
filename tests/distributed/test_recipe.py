"""The training recipe at two ranks: killed and resumed it ends with the bits of an undisturbed run."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import datasvc
from datasvc.models import describe_model, model_log
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.cluster.namespace import Namespace, RefusedError
from tests.support import warm_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("recipe") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return repository


# The recipe, but for rank 0, which after it has reported a step kills itself, or has its launcher told to end. It
# kills itself when a first version has been committed, which another thread does.
PROGRAM = """
import os, signal, sys, time
from datasvc.errors import NotFoundError
from datasvc.repository import Repository
from datasvc.trainer.recipes.reporting.events import JsonEvents

def has_version():
    url, name = (sys.argv[sys.argv.index(option) + 1] for option in ("--repo", "--name"))
    try:
        return Repository.open(url).versions("models", name).head() > 0
    except NotFoundError:
        return False

real = JsonEvents.report
def report(self, event, **facts):
    real(self, event, **facts)
    if event == "step" and facts["step"] == int(os.environ["KILL_AT_STEP"]):
        if os.environ["TERMINATES"]:
            os.kill(os.getppid(), signal.SIGTERM)
        else:
            while not has_version():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
JsonEvents.report = report

from datasvc.trainer.__main__ import main
main()
"""


def run(
    repository,
    name,
    *,
    data="digits@1",
    ranks=2,
    kill_at_step=0,
    terminates=False,
    inside=(),
    program=PROGRAM,
    **options,
):
    """Run the recipe; returns its exit status, events and standard error. `inside` are words before the command."""
    # fmt: off
    words = [
        sys.executable, "-m", "datasvc.trainer.launch", "-np", str(ranks), "--no-prefix",
        warm_python.command(), "-c", program,
        "--data", data, "--repo", repository.url, "--name", name, "--size", "32", "--resize", "32",
        "--scale", "0.8", "1", "--flip", "0", "--epochs", "2", "--batch-size", "48", "--checkpoint-every", "4",
    ]
    # fmt: on
    words += [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    environment = {**os.environ, "KILL_AT_STEP": str(kill_at_step), "TERMINATES": "yes" if terminates else ""}
    done = subprocess.run([*inside, *words], capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, events, done.stderr


def steps(events):
    return [event["step"] for event in events if event["event"] == "step"]


@pytest.fixture(scope="module")
def undisturbed(repository):
    """What a run whom nothing happens has committed last."""
    status, whole, _ = run(repository, "whole")
    assert status == 0
    assert steps(whole) == list(range(1, 29))  # 14 steps of 96 in each epoch
    return describe_model(repository, "whole")


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_with_the_weights_of_an_undisturbed_one(repository, undisturbed):
    status, killed, error = run(repository, "killed", kill_at_step=18)
    assert status != 0
    assert steps(killed) == list(range(1, 19))
    assert "rank 0" in error
    newest = describe_model(repository, "killed").entry["step"]
    assert newest in {8, 12, 16}  # the last save may not have been committed yet
    status, resumed, _ = run(repository, "killed")
    assert status == 0
    assert steps(resumed) == list(range(newest + 1, 29))
    final = describe_model(repository, "killed")
    assert final.entry["content"] == undisturbed.entry["content"]
    assert final.entry["metrics"] == undisturbed.entry["metrics"]
    assert final.entry["parent"] == f"killed@{final.version - 1}"

    again = [event["event"] for event in run(repository, "killed")[1]]
    assert sorted(again) == ["end", "restored", "restored", "start", "start"]
    assert describe_model(repository, "killed").version == final.version, "a finished run commits nothing more"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "topk:0.05"},
        {"compression": "powersgd:2:3"},
        {"op": "adasum"},
        {"sync": "local:3"},
        {"sync": "easgd:3:0.5"},
        {"sync": "diloco:6:fragments=2,delay=1,codec=int8"},  # in step 8, a fragment is being sent
        {"sync": "gossip:exponential"},
    ],
    ids=str,
)
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_with_what_each_rank_keeps_of_its_own_gradients(repository, settings):
    name, settings = re.sub(r"\W", "-", "-".join(settings.values())), {"epochs": 1, **settings}
    assert run(repository, name, **settings)[0] == 0
    assert run(repository, f"{name}-killed", kill_at_step=10, **settings)[0] != 0
    status, resumed, error = run(repository, f"{name}-killed", **settings)
    assert status == 0, error
    assert steps(resumed)[0] in {5, 9}  # the last save may not have been committed yet
    final, undisturbed = (describe_model(repository, each).entry for each in (f"{name}-killed", name))
    assert final["content"] == undisturbed["content"]
    assert final["metrics"] == undisturbed["metrics"]
    # At another number of ranks, the run continues without what each rank kept.
    status, alone, error = run(repository, f"{name}-killed", ranks=1, **{**settings, "epochs": 2, "max_steps": 15})
    assert status == 0, error
    assert steps(alone) == [15]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tournament_killed_in_a_round_has_the_rounds_and_bits_of_an_undisturbed_one(repository):
    settings = {"sync": "tournament:3:perturb=1.5,samples=64", "epochs": 1, "global_batch": 96}
    status, events, error = run(repository, "rounds", ranks=4, **settings)
    assert status == 0, error
    assert run(repository, "rounds-killed", ranks=4, kill_at_step=10, **settings)[0] != 0
    status, resumed, error = run(repository, "rounds-killed", ranks=4, **settings)
    assert status == 0, error
    assert steps(resumed)[0] in {5, 9}  # both are in the middle of a round
    undisturbed, final = (describe_model(repository, name).entry for name in ("rounds", "rounds-killed"))
    assert (final["content"], final["metrics"]) == (undisturbed["content"], undisturbed["metrics"])
    assert final["tournament"] == undisturbed["tournament"]
    reported = [event for event in events if event["event"] == "tournament"]
    assert [{"event": "tournament", **played} for played in undisturbed["tournament"]["rounds"]] == reported
    assert [(played["step"], len(played["pairs"]), len(set(played["factors"])) > 1) for played in reported] == [
        (step, 2, True) for step in (3, 6, 9, 12)
    ]
    status, alone, error = run(repository, "rounds-killed", ranks=1, **{**settings, "epochs": 2})
    assert status == 0, error
    assert steps(alone)[0] == 15
    continued = describe_model(repository, "rounds-killed").entry["tournament"]["rounds"]
    assert [played["step"] for played in continued] == list(range(3, 28, 3))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_replicas_of_tournaments_are_better_than_the_median_one_that_trains_alone(repository):
    losses = {}
    for sync in ("tournament:8", "tournament:1000"):  # the second never has a round, only the last comparison
        settings = {"sync": sync, "epochs": 12, "global_batch": 96, "checkpoint_every": 1000, "report_every": 8}
        name = sync.replace(":", "-")
        status, _, error = run(repository, name, ranks=4, **settings)
        assert status == 0, error
        losses[sync] = describe_model(repository, name).entry["tournament"]["losses"]
    # 0.097 and 0.144 where it was measured (docs/explanation/waiting.md), 0.120 and 0.127 with another seed; another
    # processor rounds differently.
    assert min(losses["tournament:8"]) < 1.1 * statistics.median(losses["tournament:1000"]), losses


@pytest.fixture
def namespace():
    """A network namespace, whose loopback carries the bytes of one run only."""
    try:
        space = Namespace()
    except RefusedError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield space
    space.close()


def loopback_bytes(space):
    """The bytes that the loopback of a namespace has carried."""
    found = subprocess.run(space.entering("cat", "/proc/net/dev"), capture_output=True, text=True, check=True)
    (line,) = (line for line in found.stdout.splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


@pytest.mark.slow
def test_power_sgd_learns_the_digits_with_a_fifth_of_the_bytes(repository, namespace):
    sent, accuracy = {}, {}
    for compression in ("none", "powersgd:2"):
        before = loopback_bytes(namespace)
        settings = {"compression": compression, "epochs": 12, "checkpoint_every": 1000}
        name = f"learns-{compression.replace(':', '-')}"
        status, _, error = run(repository, name, inside=namespace.entering("env"), **settings)
        assert status == 0, error
        sent[compression] = loopback_bytes(namespace) - before
        accuracy[compression] = describe_model(repository, name).entry["metrics"]["val_accuracy"]
    assert accuracy["powersgd:2"] >= 0.97, accuracy
    assert sent["powersgd:2"] * 5 <= sent["none"], sent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_average_their_weights_every_eight_steps_learn_the_digits(repository, ranks):
    settings = {"sync": "local:8", "epochs": 12, "global_batch": 96, "checkpoint_every": 1000, "report_every": 8}
    status, _, error = run(repository, f"averaged-{ranks}", ranks=ranks, **settings)
    assert status == 0, error
    version = describe_model(repository, f"averaged-{ranks}")
    # Above 0.97 where it was measured (docs/explanation/waiting.md); another processor rounds differently.
    assert version.entry["metrics"]["val_accuracy"] >= 0.96
    found = datasvc.open(repository.url).models.find("execution.sync = 'local:8' and execution.sync_steps::int = 8")
    assert str(version) in map(str, found)


@pytest.mark.slow
def test_a_job_that_gets_a_signal_commits_on_all_ranks_and_continues_from_there(repository, undisturbed):
    """A launcher passes SIGTERM on; the ranks look about once a second, and agree on a step."""
    status, told, error = run(repository, "told", kill_at_step=3, terminates=True, checkpoint_every=1000)
    assert status == 128 + signal.SIGTERM, error
    stopped = told[-1]
    assert (stopped["event"], stopped["version"], stopped["signal"]) == ("stopped", "told@1", signal.SIGTERM)
    assert describe_model(repository, "told").entry["step"] == stopped["step"] == steps(told)[-1]
    status, resumed, _ = run(repository, "told", checkpoint_every=1000)
    assert status == 0
    assert steps(resumed) == list(range(stopped["step"] + 1, 29))
    assert describe_model(repository, "told").entry["content"] == undisturbed.entry["content"]


# Rank 0 tells its own launcher to end, and reports the end only when rank 1 has come to its last call.
LATE_REPORT = """
import os, signal
from pathlib import Path
import datasvc.trainer as hvd
from datasvc.trainer.recipes.reporting.events import JsonEvents

folder, rank = Path(os.environ["TEST_FOLDER"]), os.environ["HOROVOD_RANK"]
real, barrier, shutdown = JsonEvents.report, hvd.barrier, hvd.shutdown
def report(self, event, **facts):
    if event == "stopped":
        while not (folder / "waits").exists():
            pass
    real(self, event, **facts)
    if event == "step" and facts["step"] == 2:
        os.kill(os.getppid(), signal.SIGTERM)
    if event == "stopped":
        (folder / "reported").touch()
def waits(call):
    def wrapped(*args):
        if rank == "1":
            assert call is barrier or (folder / "reported").exists(), "rank 1 leaves before rank 0 has reported"
            (folder / "waits").touch()
        return call(*args)
    return wrapped
JsonEvents.report, hvd.barrier, hvd.shutdown = report, waits(barrier), waits(shutdown)

from datasvc.trainer.__main__ import main
main()
"""


@pytest.mark.slow
def test_no_rank_of_a_stopped_job_leaves_before_rank_0_has_reported(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    status, events, error = run(repository, "reported", program=LATE_REPORT, checkpoint_every=1000)
    assert (status, events[-1]["event"]) == (128 + signal.SIGTERM, "stopped"), error


@pytest.mark.slow
def test_a_run_resumed_on_one_rank_with_another_batch_size_continues_at_the_right_rate(repository):
    status, _, _ = run(repository, "resized", kill_at_step=6)
    assert status != 0
    status, events, _ = run(repository, "resized", ranks=1, batch_size=32)
    assert status == 0
    rates = [event["rate"] for event in events if event["event"] == "step"]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert (max(rates) > 0.09, rates[-1] < 0.01) == (True, True)
    (use,) = describe_model(repository, "resized").entry["data"]
    assert (use["dataset"], use["split"], use["state"]["epoch"]) == ("digits@1", "train", 2)
    assert all(version.entry["code"].keys() >= {"revision", "dirty"} for version in model_log(repository, "resized"))


@pytest.mark.slow
def test_ranks_that_are_each_other_s_peers_train_to_the_same_weights(repository, undisturbed, tmp_path):
    cached = {"cache": tmp_path / "cache", "cache_budget": "50MB", "peers": "ranks"}
    status, _, error = run(repository, "peered", **cached)
    assert status == 0, error
    assert describe_model(repository, "peered").entry["content"] == undisturbed.entry["content"]


@pytest.mark.slow
def test_a_windowed_run_streams_through_a_cache_that_its_data_does_not_fit(repository, digits_folder, tmp_path):
    ingest(repository, str(digits_folder), "finely", shard_bytes=32 << 10)
    cached = {"data": "finely", "cache": tmp_path / "cache", "cache_budget": "1800000"}
    status, _, error = run(repository, "streamed", ranks=1, epochs=1, **cached)
    assert status == 1
    assert "use shuffle='windowed'" in error
    order = {"shuffle": "windowed", "lanes": 2, "block": 24}
    status, events, error = run(repository, "streamed", epochs=1, **cached, **order)
    assert status == 0, error
    assert len(steps(events)) == 14


@pytest.mark.slow
def test_a_smoke_run_of_a_layout_is_a_part_of_the_job_that_stores_nothing(repository, monkeypatch):
    monkeypatch.setenv("DATASVC_SMOKE_STEPS", "2")
    monkeypatch.setenv("DATASVC_SMOKE_RANKS", "4")
    before = sorted(Path(repository.url).rglob("*"))
    status, events, error = run(repository, "smoked", layout="shard=2,data=2")
    assert status == 0, error
    assert {"event": "smoke", "steps": 2, "batch_size": 48}.items() <= events[-1].items()
    assert sorted(Path(repository.url).rglob("*")) == before


@pytest.mark.slow
def test_errors_of_a_run_are_printed_without_a_traceback(repository):
    status, _, error = run(repository, "broken", ranks=1, data="letters")
    assert status == 1
    assert "no data set 'letters'" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_profiled_run_says_where_each_epoch_s_time_went_and_leaves_a_trace_of_each_rank(repository, tmp_path):
    status, events, error = run(repository, "profiled", profile=tmp_path / "trace.json")
    assert status == 0, error
    profiles = [event for event in events if event["event"] == "profile"]
    assert [(event["epoch"], event["num_steps"], event["num_samples"]) for event in profiles] == [
        (0, 14, 14 * 48),
        (1, 14, 14 * 48),
    ]
    assert all(event["verdict"] in error for event in profiles)
    for rank in range(2):
        spans = json.loads((tmp_path / f"trace.{rank}.json").read_text())["traceEvents"]
        assert sum(span["name"] == "wait" for span in spans) == 28
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.0.json", "trace.1.json"]


@pytest.mark.slow
def test_a_data_set_without_a_validation_split_is_trained_and_its_checkpoint_fits_no_other_data(
    repository, digits_folder
):
    ingest(repository, str(digits_folder / "val"), "unsplit")
    status, events, error = run(repository, "unsplit", ranks=1, data="unsplit", epochs=1)
    assert status == 0, error
    assert describe_model(repository, "unsplit").entry["metrics"] == {}
    assert events[-1]["version"] == f"unsplit@{describe_model(repository, 'unsplit').version}"
    status, _, error = run(repository, "unsplit", ranks=1, data="digits@1", epochs=2)
    assert status == 2
    assert "was trained on unsplit@1, this run reads digits@1; give --data the version" in error
    assert "Traceback" not in error
