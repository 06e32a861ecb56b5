"""Ranks on several hosts. ``ssh`` is a program that runs the command here, in what a fresh login would have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.trainer.launch.command_line import main

LOGIN_SHELL = """#!/bin/sh
echo "$@" >>{folder}/log
for last; do :; done
cd /
{before}
exec env -i HOME=/root PATH=/usr/bin:/bin LOGIN=fresh sh -c "$last"
"""
HERE_AND_THERE = ("-H", "localhost:1,node7:2")


@pytest.fixture
def ssh(launcher, tmp_path, monkeypatch):
    """Installs a stand-in for ssh, first on the PATH; the lines given run before the command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    launcher.environ["PATH"] = os.environ["PATH"]

    def install(before="", name="ssh"):
        (folder / name).write_text(LOGIN_SHELL.format(folder=folder, before=before))
        (folder / name).chmod(0o755)
        return folder / "log"

    install()
    return install


@pytest.fixture
def launch(ssh, capfd):
    """Runs the launcher in this process, where torch is loaded once."""

    def run(num_ranks, *command, options=()):
        returncode = main(["-np", str(num_ranks), *options, *map(str, command)])
        return subprocess.CompletedProcess(command, returncode, *capfd.readouterr())

    return run


def sh(script):
    return ("sh", "-c", script)


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def lines_by_rank(output):
    return dict(sorted((line[1], line[4:]) for line in output.splitlines()))


def test_ranks_have_their_place_the_launchers_folder_and_its_variables(launch, monkeypatch):
    odd = 'it\'s "quoted" $HOME\n  twice `x` é'
    own = {"DATASVC_ODD": odd, "MINE": "passed", "SECRET": "kept", "OMP_NUM_THREADS": "3"}
    set_all(monkeypatch, own)
    program = (
        "import json, os; e = os.environ; print(json.dumps([e['RANK'], e['WORLD_SIZE'], e['LOCAL_RANK'],"
        "e['LOCAL_WORLD_SIZE'], e['HOROVOD_HOSTNAME'], os.getcwd(), e['DATASVC_ODD'], e['MINE'], e['GIVEN'],"
        "e['OMP_NUM_THREADS'], e.get('SECRET'), e.get('LOGIN')]))"
    )
    options = (*HERE_AND_THERE, "-x", "MINE", "-x", "GIVEN=a b")
    done = launch(3, sys.executable, "-c", program, options=options)
    assert done.returncode == 0, done.stderr
    same = [os.getcwd(), odd, "passed", "a b", "3"]
    assert {rank: json.loads(line) for rank, line in lines_by_rank(done.stdout).items()} == {
        "0": ["0", "3", "0", "1", "localhost", *same, "kept", None],
        "1": ["1", "3", "0", "2", "node7", *same, None, "fresh"],
        "2": ["2", "3", "1", "2", "node7", *same, None, "fresh"],
    }


def test_nothing_of_the_environment_is_on_the_command_line(launch, ssh, monkeypatch):
    log = ssh()
    set_all(monkeypatch, {"DATASVC_TOKEN": "hunter2"})
    assert launch(1, "true", options=("-H", "me@node7", "-p", "2222")).returncode == 0
    assert "-p 2222 -- me@node7 exec " in log.read_text()
    assert "hunter2" not in log.read_text()


@pytest.mark.slow
def test_ranks_on_several_hosts_meet_and_reduce(launch, ssh, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, trainer as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()\n"
        "print(total, hvd.cross_rank(), hvd.cross_size(), flush=True)\n"
    )
    done = launch(3, sys.executable, program, options=HERE_AND_THERE)
    assert done.returncode == 0, done.stderr
    assert lines_by_rank(done.stdout) == {"0": "6.0 0 2", "1": "6.0 1 2", "2": "6.0 0 1"}


@pytest.mark.slow
def test_a_rank_that_fails_elsewhere_ends_all_and_is_named_with_its_host_and_last_words(
    launch, ssh, tmp_path, has_ended
):
    os.mkfifo(tmp_path / "fifo")
    stubborn = f"trap '' TERM; sleep 1000 & echo $$ $! >{tmp_path}/fifo; wait"
    script = f"if [ $RANK = 1 ]; then {stubborn}; elif [ $RANK = 0 ]; then exec sleep 1000; fi; "
    script += f"read pids <{tmp_path}/fifo; echo $pids >&2; kill -SEGV $$"
    done = launch(3, *sh(script), options=(*HERE_AND_THERE, "--grace-s", "0.2"))
    assert done.returncode == 128 + 11
    said, words = done.stderr.splitlines()[-2:]
    assert said == "datasvc-run: rank 2 on node7 was the first to fail: it was killed by SIGSEGV"
    pids = [int(pid) for pid in words.removeprefix("  [2] ").split()]
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


def test_the_output_of_a_rank_elsewhere_goes_to_its_files_without_the_guards_reports(launch, ssh, tmp_path):
    options = ("-H", "node7:1", "--output-filename", str(tmp_path / "out"), "--no-prefix")
    done = launch(1, *sh("echo out; printf 'no end' >&2"), options=options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "no end\n")
    assert (tmp_path / "out" / "rank.0" / "stderr").read_text() == "no end"


def test_no_rank_elsewhere_outlives_a_launcher_that_is_killed(launcher, ssh, has_ended):
    process = launcher.start(3, *sh("echo $$; exec sleep 1000"), options=HERE_AND_THERE)
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(3)]
    process.kill()
    process.wait()
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.slow
def test_a_signal_is_passed_on_to_ranks_elsewhere(launcher, ssh):
    program = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print(1, flush=True)\n"
    process = launcher.start(1, sys.executable, "-c", program + "while True: signal.pause()", options=("-H", "node7"))
    assert process.stdout.readline() == "1\n"
    process.terminate()
    assert "it exited with status 5" in process.communicate(timeout=60)[1]
    assert process.returncode == 5


def test_signals_have_their_usual_effect_on_ranks_elsewhere(launch):
    program = "import signal; print([signal.getsignal(n).name for n in (1, 15)])"
    done = launch(1, sys.executable, "-c", program, options=("-H", "node7", "--no-prefix"))
    assert done.stdout == "['SIG_DFL', 'SIG_DFL']\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("elastic", [(), ("--min-num-proc", "1")])
def test_ranks_elsewhere_share_the_processors_that_they_may_use(launch, monkeypatch, elastic):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        done = launch(1, *sh("echo $OMP_NUM_THREADS"), options=("-H", "node7:1", "--no-prefix", *elastic))
    finally:
        os.sched_setaffinity(0, processors)
    assert done.stdout == "1\n"


def test_an_unreachable_host_is_named_with_the_error_of_ssh(launch, ssh):
    ssh('case "$*" in *bad9*) echo "ssh: connect to host bad9: No route" >&2; exit 255;; esac')
    done = launch(2, *sh("exec sleep 1000"), options=("-H", "node7:1,bad9:1"))
    assert done.returncode == 255
    assert (
        "rank 1 on bad9 was the first to fail: it was not started: ssh to bad9 exited with status 255" in done.stderr
    )
    assert "  [1] ssh: connect to host bad9: No route" in done.stderr


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_named_when_the_time_to_start_is_up(launch, ssh):
    ssh('case "$*" in *slow8*) exec sleep 1000;; esac')
    options = ("-H", "node7:1,slow8:2", "--start-timeout", "2", "--grace-s", "0.2")
    done = launch(3, *sh("exec sleep 1000"), options=options)
    assert done.returncode == 1
    assert (
        "rank 1 on slow8 was the first to fail: it did not start within 2 s; rank 2 on slow8 did not either"
        in done.stderr
    )


@pytest.mark.slow
def test_a_rank_that_does_not_call_init_is_named_when_the_time_to_start_is_up(launch, ssh):
    program = "import os, signal, trainer as hvd\nif os.environ['RANK'] == '1': signal.pause()\nhvd.init()"
    options = ("-H", "localhost:1,node7:1", "--start-timeout", "2")
    done = launch(2, sys.executable, "-c", program, options=options)
    assert done.returncode == 1
    said = "rank 1 on node7 was the first to fail: it did not call hvd.init() within 2 s"
    assert said in done.stderr


def test_a_program_that_is_not_there_is_reported_with_its_host(launch, ssh):
    done = launch(1, "no-such-program", options=("-H", "node7"))
    assert done.returncode == 127
    assert "rank 0 on node7" in done.stderr
    assert "was not started: [Errno 2] No such file or directory: 'no-such-program'" in done.stderr


def test_more_ranks_than_connections_are_let_in_at_once_all_come(launch, ssh):
    done = launch(12, *sh("echo $LOCAL_RANK"), options=("-H", "node7:12", "--no-prefix"))
    assert sorted(map(int, done.stdout.split())) == list(range(12))


def test_too_few_slots_are_a_usage_error(launch, ssh):
    done = launch(4, "true", options=HERE_AND_THERE)
    assert (done.returncode, "4 ranks need as many slots" in done.stderr) == (2, True)


def test_inside_an_allocation_srun_leads_to_the_nodes(launch, ssh, monkeypatch):
    # srun takes the command as words, which may hold spaces.
    log = ssh(name="srun", before='while [ "$1" != "${1#--}" ] || [ "$1" = srun ]; do shift; done\nexec "$@"')
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURMD_NODENAME": "n1",
    }
    set_all(monkeypatch, slurm)
    done = launch(4, *sh("echo $HOROVOD_HOSTNAME $LOCAL_RANK"))
    assert lines_by_rank(done.stdout) == {"0": "n1 0", "1": "n1 1", "2": "n2 0", "3": "n2 1"}, done.stderr
    assert log.read_text().count("--nodelist=n2") == 2
    assert "--nodelist=n1" not in log.read_text()
