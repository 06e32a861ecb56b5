"""The smoke run before a job: what it runs where, and when the job starts after it."""

import os
import signal
from pathlib import Path

import pytest

from datasvc.trainer.launch.command_line import parse_arguments, run_job
from datasvc.trainer.launch.ranks.job import Host, LaunchJob
from datasvc.trainer.launch.smoke import plan_smoke


def parse(*options):
    return parse_arguments([*options, "true"], {})[0]


def test_it_runs_on_the_first_host_and_writes_no_files_of_the_job():
    smoke = plan_smoke(parse("--smoke", "2", "--smoke-timeout", "9", "-H", "a:2,b:2", "--output-filename", "out"))
    assert (smoke.num_ranks, smoke.hosts, smoke.output_folder) == (2, (Host("a", 2),), None)
    assert (smoke.time_limit_s, smoke.smoke_ranks) == (9, None)
    assert smoke.variables["DATASVC_SMOKE_RANKS"] == "4"
    smoke = plan_smoke(parse("--smoke", "1", "-np", "2", "--timeline-filename", "trace", "-x", "A=1"))
    assert (smoke.hosts, smoke.variables["HOROVOD_TIMELINE"], smoke.variables["A"]) == ((), "", "1")


def test_an_elastic_job_has_a_static_smoke_run():
    job, elastic = parse_arguments(["--smoke", "1", "--min-np", "2", "--host-discovery-script", "find", "true"], {})
    assert elastic is not None
    assert plan_smoke(job).variables["DATASVC_SMOKE_RANKS"] == "2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--smoke", "3", "-np", "2"], "--smoke 3 is more than the 2 ranks of the job"),
        (["--smoke", "2", "-H", "a:1,b:1"], "--smoke 2 is more than the 1 slots of a"),
        (["--smoke-timeout", "2", "-np", "2"], "give --smoke as well"),
    ],
)
def test_what_it_cannot_be_is_a_usage_error(capsys, options, message):
    with pytest.raises(SystemExit):
        parse(*options)
    assert message in capsys.readouterr().err


def run(script, **settings):
    """Run a job of three ranks after a smoke run of one; `$S` is empty in the job."""
    command = ["sh", "-c", f"S=$DATASVC_SMOKE_STEPS; echo $S/$DATASVC_SMOKE_RANKS of $WORLD_SIZE >>log; {script}"]
    return run_job(LaunchJob(command=command, num_ranks=3, smoke_ranks=1, **settings), None, os.environ)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read_log():
    return Path("log").read_text().splitlines()


def test_after_a_smoke_run_that_passes_the_job_starts_without_its_variables(capfd):
    assert run("true") is None
    assert read_log() == ["2/3 of 1", *["/ of 3"] * 3]
    assert "the smoke run has passed; the job starts with 3 ranks" in capfd.readouterr().err


def test_after_a_smoke_run_that_fails_no_job_starts():
    failure = run("[ -z $S ] || { echo no such option; exit 3; }")
    assert (failure.exit_status, failure.last_lines) == (3, ("no such option",))
    assert failure.text == (
        "the smoke run has failed, and the job was not started: rank 0 was the first to fail: it exited with status 3"
    )
    assert read_log() == ["2/3 of 1"]


@pytest.mark.slow
def test_a_program_that_does_not_end_fails_at_the_time_limit():
    failure = run("[ -z $S ] || exec sleep 1000", smoke_timeout_s=2.0, grace_s=0.2)
    assert failure.exit_status == 1
    assert "it did not end within 2 s" in failure.text
    assert read_log() == ["2/3 of 1"]


def test_a_signal_in_a_smoke_run_ends_the_job_even_if_the_program_ends_well():
    ends_well = "trap 'kill $!; exit 0' INT; sleep 1000 & kill -INT $LAUNCHER; wait"
    failure = run(f"[ -z $S ] || {{ {ends_well}; }}", variables={"LAUNCHER": str(os.getpid())})
    assert failure.exit_status == 128 + signal.SIGINT
    assert read_log() == ["2/3 of 1"]
