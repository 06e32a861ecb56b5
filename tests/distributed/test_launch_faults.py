"""What goes wrong around the launcher: full disks, dead guards, forked children. No rank is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from datasvc.trainer.launch.ranks import remote_guard
from datasvc.trainer.launch.ranks.job import LaunchJob
from datasvc.trainer.launch.ranks.rank_group import RankGroup
from datasvc.trainer.launch.ranks.rank_process import RankProcess, RankStart, StartError
from datasvc.trainer.launch.ranks.static_job import run_static_job

STUBBORN = "trap '' TERM; echo $$ >{fifo}; while true; do sleep 1000; done"


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def run(script, num_ranks=2, **settings):
    return run_static_job(LaunchJob(command=["sh", "-c", script], num_ranks=num_ranks, **settings), os.environ)


def rank_start(script, worker_id="0", **settings):
    return RankStart(worker_id=worker_id, command=["sh", "-c", script], environ=os.environ, **settings)


def children():
    """The processes that this one has started and not reaped."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def test_a_file_on_a_full_disk_harms_no_rank_and_hides_no_failure(capfd, fifo, tmp_path):
    (tmp_path / "out" / "rank.0").mkdir(parents=True)
    (tmp_path / "out" / "rank.0" / "stdout").symlink_to("/dev/full")
    lines = "for i in 1 2 3; do echo $i; done; echo alive >&2; "
    script = f"if [ $RANK = 0 ]; then {lines} echo go >{fifo}; exec sleep 1000; fi; read go <{fifo}; exit 9"
    failure = run(script, output_folder=tmp_path / "out")
    assert (failure.rank, failure.exit_status) == (1, 9)
    output, errors = capfd.readouterr()
    assert output == "[0] 1\n[0] 2\n[0] 3\n"
    assert "[0] alive" in errors
    assert errors.count("cannot write") == 1


def test_a_file_that_cannot_be_made_is_not_taken_for_a_missing_program(launcher, tmp_path):
    (tmp_path / "rank.0" / "stdout").mkdir(parents=True)
    done = launcher.run(1, "true", options=("--output-filename", tmp_path))
    assert done.returncode == 1
    assert "the launcher has failed: [Errno 21] Is a directory" in done.stderr


def test_a_program_that_is_not_executable_has_another_status_than_a_missing_one(launcher, tmp_path):
    (tmp_path / "program").write_text("")
    assert launcher.run(1, tmp_path / "program").returncode == 126
    assert launcher.run(1, tmp_path / "none").returncode == 127


@pytest.mark.parametrize(("name", "status", "reason"), [("program", 126, "Errno 13"), ("none", 127, "Errno 2")])
def test_an_elastic_job_has_the_same_statuses_and_reports_the_reason(launcher, tmp_path, name, status, reason):
    (tmp_path / "program").write_text("")
    done = launcher.run(1, tmp_path / name, options=("--min-num-proc", "1"))
    assert done.returncode == status
    assert f"was the first to fail: it was not started: cannot run {tmp_path / name}: [{reason}]" in done.stderr


@pytest.mark.parametrize("remote_command", [None, ["sh", "-c", "exec sleep 1000"]])
def test_a_start_that_fails_leaves_no_process(tmp_path, remote_command):
    (tmp_path / "stderr").mkdir()
    with RankGroup(grace_s=0.1) as group:
        before = children()
        for _ in range(10):  # More often than connections are let in at once.
            with pytest.raises(IsADirectoryError):
                group.start(rank_start("exec sleep 1000", remote_command=remote_command, output_folder=tmp_path))
        assert children() == before


@pytest.mark.parametrize("remote_command", [None, ["sh", "-c", "exec sleep 1000"]])
def test_a_process_that_cannot_be_watched_is_ended(monkeypatch, remote_command):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with RankGroup(grace_s=0.1) as group:
        before = children()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            group.start(rank_start("exec sleep 1000", remote_command=remote_command))
        assert children() == before


def test_a_notice_that_comes_while_a_rank_is_started_reaches_it(monkeypatch):
    connect = RankProcess._connect

    def connect_late(process):
        connect(process)
        group.notify(signal.SIGUSR1)  # the process runs, and is not registered

    monkeypatch.setattr(RankProcess, "_connect", connect_late)
    with RankGroup(grace_s=0.1) as group:
        group.start(rank_start("exec sleep 1000"))
        assert group.next_end(timeout_s=60).returncode == -signal.SIGUSR1


# Takes SIGUSR1, and prints the status of a child that does not handle it.
TAKES_NOTICE = """
import signal, subprocess
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print("ready", flush=True)
signal.sigwait({signal.SIGUSR1})
child.communicate()
print("noticed", child.returncode, flush=True)
"""


@pytest.mark.slow
def test_a_notice_of_the_scheduler_reaches_each_rank_and_not_its_children(launcher):
    """pytorch/pytorch#154849: SIGUSR1, the notice of a preemption, ended the launcher, and no rank got it."""
    process = launcher.start(2, sys.executable, "-S", "-c", TAKES_NOTICE)
    assert [process.stdout.readline()[4:] for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGUSR1)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert [line[4:] for line in output.splitlines()] == ["noticed 0"] * 2


def start_remotely(*command):
    """Start the command under the guard of a remote host, with pipes; return the guard."""
    order = {"mark": "!", "command": command, "environ": {}, "folder": "/", "grace_s": 0.1}
    arguments = [sys.executable, "-I", "-S", remote_guard.__file__]
    guard = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    guard.stdin.write(json.dumps({**order, "master_addresses": [], "num_neighbours": 1}).encode() + b"\n")
    guard.stdin.flush()
    return guard


def test_a_notice_reaches_a_rank_of_another_host():
    with start_remotely(sys.executable, "-S", "-c", TAKES_NOTICE) as guard:
        assert guard.stdout.readline() == b"ready\n"
        guard.stdin.write(b"notify %d\n" % signal.SIGUSR1)
        guard.stdin.flush()
        assert guard.stdout.readline() == b"noticed 0\n"


@pytest.mark.parametrize("last_words", [b"sig", b"nonsense\n", b""])
def test_a_launcher_that_dies_in_the_middle_of_an_order_leaves_no_remote_rank(has_ended, last_words):
    guard = start_remotely("sleep", "1000")
    pid = int(guard.stderr.readline().split()[-1])
    guard.stdin.write(last_words)
    guard.stdin.close()
    assert has_ended(pid)
    # Half a line is no order.
    assert (b"Traceback" in guard.stderr.read()) == (last_words == b"nonsense\n")
    guard.wait(timeout=60)


def test_all_ranks_are_ended_although_their_guard_is_dead(fifo, has_ended):
    before = children()
    with RankGroup(grace_s=0.1) as group:
        (guard,) = children() - before
        for worker_id in "01":
            group.start(rank_start(STUBBORN.format(fifo=fifo), worker_id))
        pids = [process.pid for process in group.processes.values()]
        with fifo.open() as ready:
            assert len([ready.readline() for _ in range(2)]) == 2
        os.kill(guard, signal.SIGKILL)
        assert has_ended(guard)
        with pytest.raises(ChildProcessError, match=r"the guard process .* has exited"):
            group.start(rank_start("exec sleep 1000", "2"))
    assert all(has_ended(pid) for pid in pids)
    assert group.processes == {}
    assert children() == before


def test_all_ranks_are_ended_although_the_end_of_one_fails(monkeypatch):
    before = children()
    with pytest.raises(RuntimeError, match="on purpose"), RankGroup(grace_s=0.1) as group:

        def fail(deadline_s):
            finish_termination(deadline_s)
            raise RuntimeError("on purpose")

        for worker_id in "012":
            group.start(rank_start("exec sleep 1000", worker_id))
        finish_termination = group.processes["0"].finish_termination
        monkeypatch.setattr(group.processes["0"], "finish_termination", fail)
    assert children() == before


@pytest.fixture
def forked():
    """Forks a child that runs a function, if any, and then waits until the test is over."""
    read_end, write_end = os.pipe()
    pids = []

    def fork(work):
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            status = 1
            try:
                status = work() or 0
                os.read(read_end, 1)
            finally:
                os._exit(status)
        pids.append(pid)
        return pid

    yield fork
    os.close(write_end)
    os.close(read_end)
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_job_ends_although_this_process_was_forked_meanwhile(forked):
    with RankGroup(grace_s=0.1) as group:
        group.start(rank_start("exec sleep 1000"))
        forked(lambda: None)


def test_a_forked_child_holds_no_pipe_to_a_guard(forked):
    with RankGroup(grace_s=0.1) as group:
        group.start(rank_start("true", remote_command=["sh", "-c", "cat >/dev/null"]))
        pipes = [group._guard._pipe, group.processes["0"]._process.stdin]

        def check():
            return int(any(os.readlink(f"/proc/self/fd/{pipe.fileno()}") != os.devnull for pipe in pipes))

        forked(check)


@pytest.mark.slow
def test_no_rank_outlives_a_killed_launcher_whose_child_holds_its_pipes(launcher, tmp_path, has_ended):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, subprocess\n"
        "from datasvc.trainer.launch.ranks.rank_group import RankGroup\n"
        "from datasvc.trainer.launch.ranks.rank_process import RankStart\n"
        "with RankGroup(grace_s=0.1) as group:\n"
        "    start = RankStart(worker_id='0', command=['sleep', '1000'], environ=os.environ)\n"
        "    rank = group.start(start)\n"
        "    held = os.dup(group._guard._process.stdin.fileno())\n"
        "    child = subprocess.Popen(['sleep', '1000'], pass_fds=[held], stdout=subprocess.DEVNULL)\n"
        "    print(rank.pid, child.pid, flush=True)\n"
        "    signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, script], env=launcher.environ, stdout=subprocess.PIPE, text=True)
    launcher.started.append(process)
    rank, child = map(int, process.stdout.readline().split())
    process.kill()
    process.wait()
    try:
        assert has_ended(rank)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_ranks_that_failed_together_are_not_waited_for_one_after_the_other(fifo):
    # Each leaves a child in a session of its own that holds its output open. Waiting for each would exceed the limit.
    script = f"setsid sh -c 'read x <{fifo}' & echo HorovodInternalError >&2; exit 1"
    try:
        failure = run(script, num_ranks=20, grace_s=0.1)
    finally:
        os.close(os.open(fifo, os.O_RDWR))
    assert failure.exit_status == 1


def test_no_signal_is_sent_once_a_rank_is_gone_whose_number_may_be_anothers(monkeypatch):
    sent = []
    with RankGroup(grace_s=0.1) as group:
        processes = [group.start(rank_start("exec sleep 1000", worker_id)) for worker_id in "01"]
        group.terminate()
        monkeypatch.setattr(os, "killpg", lambda *arguments: sent.append(arguments))
        for process in processes:
            process.send(signal.SIGTERM)
            process.begin_termination(0.1)
        group.forward_signal(signal.SIGINT)
    assert sent == []


def test_a_shell_that_is_not_there_is_named():
    with RankGroup(grace_s=0.1) as group, pytest.raises(StartError, match="cannot run no-such-shell"):
        group.start(rank_start("true", remote_command=["no-such-shell"]))
