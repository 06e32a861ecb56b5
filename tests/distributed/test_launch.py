"""The launcher with ranks that are small shell programs. Nothing waits for time to pass, only for events."""

import os
import signal
import sys

import pytest

from datasvc.threads import count_processors
from datasvc.trainer.launch.command_line import parse_arguments
from datasvc.trainer.launch.ranks import placement
from datasvc.trainer.launch.ranks.job import LaunchJob
from datasvc.trainer.launch.ranks.placement import plan_threads
from datasvc.trainer.launch.ranks.static_job import run_static_job
from datasvc.trainer.rendezvous.messages import PREFIX_VARIABLE, WORKER_VARIABLE

SLEEP = "exec sleep 1000"


def run(script, num_ranks=2, **settings):
    job = LaunchJob(command=["sh", "-c", script], num_ranks=num_ranks, **settings)
    return run_static_job(job, os.environ)


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_ranks_get_torchruns_and_horovods_variables(capfd):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR HOROVOD_RANK HOROVOD_HOSTNAME"
    assert run("echo " + " ".join(f"${name}" for name in names.split())) is None
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[{r}] {r} 2 {r} 2 127.0.0.1 {r} localhost" for r in (0, 1)]


def test_ranks_do_not_join_an_elastic_job_in_which_the_launcher_runs(capfd, monkeypatch):
    for name in (WORKER_VARIABLE, PREFIX_VARIABLE, "HOROVOD_ELASTIC"):
        monkeypatch.setenv(name, "of another job")
    assert run("env", num_ranks=1) is None
    assert "of another job" not in capfd.readouterr().out


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_the_processors_that_the_launcher_may_use_are_shared_out_unless_the_user_chose(monkeypatch):
    processors = os.sched_getaffinity(0)
    assert plan_threads(1, {}) == {"OMP_NUM_THREADS": str(count_processors())}
    os.sched_setaffinity(0, {min(processors)})
    try:
        assert plan_threads(1, {}) == {"OMP_NUM_THREADS": "1"}
    finally:
        os.sched_setaffinity(0, processors)
    monkeypatch.setattr(placement, "count_processors", lambda: 6)  # as a limit of the container allows
    assert plan_threads(2, {}) == {"OMP_NUM_THREADS": "3"}
    assert plan_threads(10**6, {}) == {"OMP_NUM_THREADS": "1"}
    assert plan_threads(2, {"OMP_NUM_THREADS": "7"}) == {"OMP_NUM_THREADS": "7"}


def test_output_also_goes_to_a_file_per_rank_and_prefixes_can_be_left_out(capfd, tmp_path):
    assert run("echo out $RANK; printf err$RANK >&2", prefixes_lines=False, output_folder=tmp_path) is None
    assert sorted(capfd.readouterr().out.splitlines()) == ["out 0", "out 1"]
    assert (tmp_path / "rank.1" / "stdout").read_text() == "out 1\n"
    assert (tmp_path / "rank.0" / "stderr").read_text() == "err0"


def test_the_first_rank_that_fails_ends_the_others_with_their_children(fifo, has_ended):
    # Rank 1 ignores SIGTERM and has a child; rank 0 fails when both are there.
    stubborn = f"trap '' TERM; sleep 1000 & echo $$ $! >{fifo}; wait"
    failure = run(f"if [ $RANK = 1 ]; then {stubborn}; fi; read pids <{fifo}; echo $pids >&2; exit 7", grace_s=0.2)
    assert (failure.rank, failure.exit_status) == (0, 7)
    pids = [int(pid) for pid in failure.last_lines[-1].split()]
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


def test_a_failure_is_described_with_its_signal_and_last_words():
    failure = run("if [ $RANK = 1 ]; then echo last words >&2; kill -SEGV $$; fi; " + SLEEP)
    assert failure.exit_status == 128 + signal.SIGSEGV
    assert failure.describe() == "rank 1 was the first to fail: it was killed by SIGSEGV\n  [1] last words"


def test_the_last_lines_of_a_failure_are_those_of_both_streams_the_errors_last():
    failure = run("seq 9; echo trace >&2; echo error >&2; exit 1", num_ranks=1)
    assert failure.last_lines == ("5", "6", "7", "8", "9", "trace", "error")
    assert run("echo 'no memory'; exit 1", num_ranks=1).last_lines == ("no memory",)


def test_a_rank_that_ends_well_early_ends_no_other(capfd, fifo):
    assert run(f"if [ $RANK = 1 ]; then read go <{fifo}; echo done; else echo go >{fifo}; fi") is None
    assert "[1] done" in capfd.readouterr().out


def read_pids(process, num_ranks):
    return [int(process.stdout.readline().split()[-1]) for _ in range(num_ranks)]


def test_no_rank_outlives_a_launcher_that_is_killed(launcher, has_ended):
    process = launcher.start(2, "sh", "-c", f"echo $$; {SLEEP}")
    pids = read_pids(process, 2)
    process.kill()
    process.wait()
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_is_passed_on_to_every_rank(launcher, number):
    # In Python, because a shell without a terminal ignores SIGINT for what it starts.
    program = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    process = launcher.start(2, sys.executable, "-S", "-c", program)
    assert [process.stdout.readline()[4:] for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "was the first to fail: it exited with status 5" in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_a_signal_ends_have_not_failed(launcher, number):
    """The launcher says in one line that the signal ended the job, without the last lines of a rank."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('ready', flush=True); signal.pause()"
    )
    process = launcher.start(2, sys.executable, "-S", "-c", program)
    assert [process.stdout.readline()[4:] for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + number, f"datasvc-run: ended by {number.name}\n")


def test_a_command_that_does_not_exist_is_reported(launcher):
    done = launcher.run(2, "no-such-program")
    assert done.returncode == 127
    assert "cannot run no-such-program" in done.stderr


def test_arguments_after_the_program_belong_to_the_program():
    job, _ = parse_arguments(["-np", "2", "--no-prefix", "python", "train.py", "-np", "3", "--lr=1"])
    assert job == LaunchJob(command=["python", "train.py", "-np", "3", "--lr=1"], num_ranks=2, prefixes_lines=False)
    assert parse_arguments(["-np", "1", "--", "x"])[0].command == ["x"]


@pytest.mark.parametrize("arguments", [["-np", "2"], ["-np", "0", "x"], ["x"]])
def test_a_command_line_that_describes_no_job_is_a_usage_error(arguments):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments)
    assert caught.value.code == 2
