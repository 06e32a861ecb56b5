"""`python -m datasvc.trainer profile` at two ranks: what it prints fits together; nothing here judges a speed."""

import json
import subprocess
import sys

import pytest

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.planning.step import StepCosts, StepMode, step_time
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.trainer.recipes.profiling.command import _choose_compressions, main
from datasvc.trainer.recipes.settings.config import TrainConfig
from tests.support import warm_python

MODES = {str(mode) for mode in StepMode}


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("profile") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return repository


def words(repository):
    options = ("--size", "32", "--batch-size", "8", "--steps", "2", "--rounds", "2")
    return ["--data", "digits", "--repo", repository.url, *options]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_measure_a_step_part_by_part_predict_and_check(launcher, repository, tmp_path):
    options = ("--micro-batch", "4", "--check", "--json", "--nodes", "1", "64", "--trace", tmp_path / "trace.json")
    options += ("--compressions", "fp16", "quantized:int8", "topk:0.01")
    command = [warm_python.command(), "-m", "datasvc.trainer", "profile", *words(repository), *options]
    done = launcher.run(2, *command, options=("--no-prefix",), timeout_s=500.0)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    costs = StepCosts.from_dict(found["costs"])
    assert found["step_s"] == {mode: step_time(costs, mode) for mode in StepMode}
    assert found["measured"].keys() == MODES
    assert [prediction["world_size"] for prediction in found["predictions"]] == [1, 64]
    assert (found["world_size"], found["config"]["micro_batch"]) == (2, 4)
    assert found["predictions"][0]["efficiency"] == dict.fromkeys(MODES, 1.0)
    names = [step["compression"] for step in found["compressions"]]
    assert names == ["none", "fp16", "quantized:int8", "topk:0.01"]
    assert found["compressions"][0]["step_s"] == found["step_s"][StepMode.OVERLAPPED]
    gradient_bytes = sum(layer["gradient_bytes"] for layer in found["layers"])
    assert sum(message.size_bytes for message in costs.messages) == gradient_bytes
    assert all(seconds > 0 for seconds in (costs.io_s, costs.forward_s, costs.backward_s, costs.reduce_s))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.0.json", "trace.1.json"]
    events = json.loads((tmp_path / "trace.1.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"io", "forward", "backward", "all-reduce", "update", "(loss)"}

    simulated = subprocess.run(
        [sys.executable, "tools/simulate_training.py", "-", "--nodes", "1", "4096", "--json", "--steps", "3"],
        input=done.stdout,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [row["world_size"] for row in json.loads(simulated.stdout)] == [1, 4096]


@pytest.mark.slow
def test_one_rank_prints_tables_and_a_verdict_even_if_the_trace_cannot_be_written(repository, capsys, tmp_path):
    with pytest.raises(ConfigError, match="cannot"):
        main([*words(repository), "--compressions", "--top", "2", "--nodes", "2", "--trace", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("compression") for line in lines)  # a single rank sends nothing
    assert lines[0] == "small-cnn, 1 ranks, 8 images each, median of 2 rounds"
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in MODES] == list(StepMode)
    assert [line.split()[1] for line in lines if line.split()[:1] == ["2"]] == list(StepMode)
    assert lines[-2].startswith("note: this profile is of one rank")
    assert "-bound: " in lines[-1]
    assert not hvd.is_initialized()


DIES_ON_RANK_1 = """
import os, signal
import datasvc.trainer as hvd
from datasvc.trainer.__main__ import main
from datasvc.trainer.recipes.profiling import profile_steps

measure = profile_steps.measure_traffic

def die(*arguments):
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*arguments)

profile_steps.measure_traffic = die
main()
"""


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_profile_and_is_named(launcher, repository):
    done = launcher.run(
        2, warm_python.command(), "-c", DIES_ON_RANK_1, "profile", *words(repository), options=("--no-prefix",)
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "rank 1 was the first to fail" in done.stderr


def test_the_settings_are_shown_without_data_and_nothing_runs(capsys):
    main(["--show-config", "--batch-size", "7"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    shown = {row[0]: row[1] for row in rows}
    assert (shown["data"], shown["batch_size"]) == ("?", "7")
    assert not hvd.is_initialized()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["fp16", "quantized:int8", "quantized:int4", "quantized:onebit"]),
        ({"bucket": "auto"}, ["fp16"]),
        ({"precision": "fp16"}, ["fp16"]),
    ],
)
def test_the_usual_compressions_are_those_that_the_settings_allow(options, expected):
    config = TrainConfig(data="digits", repo="repo", name="profile", **options)
    assert _choose_compressions([], config) == expected
    assert _choose_compressions(None, config) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "0"], "steps is 0"),
        (["--nodes", "8", "--bandwidth", "fast"], "'fast' is not a bandwidth"),
        (["--trace", "/nowhere/trace.json"], "its folder does not exist"),
        (["--compressions", "topk:2"], "compression is 'topk:2'"),
        (["--compressions", "topk:0.1", "--bucket", "auto"], "--compressions topk:0.1: .* give --bucket a size"),
        (["--compressions", "bf16", "onebit"], "--compressions onebit: compression is 'onebit'"),
        (["--compressions", "--sync", "local:8"], "sync is local:8; .*: give --sync bsp"),
        (["--profile", "trace.json"], "use --trace FILE to write a trace of one step"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_anything_runs(repository, options, says):
    with pytest.raises(ConfigError, match=says):
        main(["--data", "digits", "--repo", repository.url, *options])
    assert not hvd.is_initialized()
