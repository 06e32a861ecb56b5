"""The command lines that lead to other hosts, and what goes along."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.launch.ranks.hosts import choose_passed, is_local, plan_remote_command
from datasvc.trainer.launch.ranks.job import RemoteSettings
from datasvc.trainer.launch.ranks.rank_group import BOOTSTRAP


def test_this_machine_is_known_by_its_names():
    assert all(map(is_local, ("localhost", "127.0.0.1", "::1", socket.gethostname())))
    assert not is_local("elsewhere")
    assert is_local("node7", {"SLURMD_NODENAME": "node7"})


def test_ssh_prompts_for_nothing_and_takes_no_host_for_an_option():
    settings = RemoteSettings(ssh_port=2222, ssh_identity_file=Path("my key"))
    command = plan_remote_command("node1", settings)
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[command.index("-p") + 1] == "2222"
    assert command[command.index("-i") + 1] == "my key"
    assert command[-3:-1] == ["--", "node1"]


def test_srun_starts_one_task_on_the_node_beside_those_that_run():
    command = plan_remote_command("node1", RemoteSettings(shell="srun"))
    assert command[0] == "srun"
    assert {"--overlap", "--ntasks=1", "--nodelist=node1", "--cpu-bind=none"} <= set(command)


@given(st.text(min_size=1).filter(lambda text: "\0" not in text and text.isprintable()))
def test_any_path_of_an_interpreter_survives_the_remote_shell(path):
    line = plan_remote_command("node1", RemoteSettings(python=path))[-1]
    assert shlex.split(line) == ["exec", path, "-I", "-S", "-c", BOOTSTRAP]


def test_the_bootstrap_runs_what_it_is_sent_and_leaves_the_rest_to_it():
    source = b"print(sys.stdin.readline())"
    command = [sys.executable, "-I", "-S", "-c", BOOTSTRAP]
    done = subprocess.run(
        command, input=b"%d\n%srest\n" % (len(source), source), capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b"rest\n\n"


def test_the_usual_variables_and_the_named_ones_are_passed():
    usual = dict.fromkeys(["PATH", "PYTHONPATH", "HOROVOD_X", "DATASVC_Y", "NCCL_Z", "OMP_NUM_THREADS", "RANK"], "1")
    own = {"HOME": "/root", "DISPLAY": ":0", "SSH_AUTH_SOCK": "x", "MINE": "2"}
    assert choose_passed({**usual, **own}) == usual
    assert choose_passed({**usual, **own}, ["MINE", "NOT_THERE"]) == {**usual, "MINE": "2"}
