"""Ranks behind a real ssh and a real sshd, which ssh starts for each connection: no port, no daemon."""

import os
import signal
import sys

import pytest

from tests.distributed.ssh_hosts import SSHD, install_client, needs_ssh, skip_without_login, write_identity

ONE_SSHD_EACH = """
Host *
    HostName 127.0.0.1
    ProxyCommand {sshd} -i -f {folder}/server
"""

pytestmark = [pytest.mark.slow, needs_ssh]


@pytest.fixture
def identity(launcher, tmp_path):
    """A key that lets the launcher in on any host, all of which are this machine."""
    options = write_identity(tmp_path)
    install_client(tmp_path, launcher.environ, ONE_SSHD_EACH.format(folder=tmp_path, sshd=SSHD))
    skip_without_login(tmp_path, "node7")
    return options


def test_ranks_on_two_hosts_meet_and_reduce(launcher, identity, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, trainer as hvd\n"
        "hvd.init()\n"
        "print(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item(), flush=True)\n"
    )
    options = (*identity, "-H", "node7:1,node8:1")
    done = launcher.run(2, sys.executable, program, options=options)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 3.0", "[1] 3.0"]


def test_how_a_rank_ended_and_its_last_words_come_back(launcher, identity):
    options = (*identity, "-H", "node7:1")
    done = launcher.run(1, "sh", "-c", "echo last words >&2; kill -SEGV $$", options=options)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 0 on node7 was the first to fail: it was killed by SIGSEGV\n  [0] last words" in done.stderr


def test_no_rank_outlives_the_launcher(launcher, identity, has_ended):
    process = launcher.start(2, "sh", "-c", "echo $$; exec sleep 1000", options=(*identity, "-H", "node7:1,node8:1"))
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.kill()
    process.wait()
    assert all(has_ended(pid) for pid in pids)


def test_a_connection_that_is_lost_ends_its_rank_and_the_job(launcher, identity, tmp_path, has_ended):
    process = launcher.start(2, "sh", "-c", "echo $$; exec sleep 1000", options=(*identity, "-H", "node7:1,node8:1"))
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    # The first is the fixture's own.
    client = int((tmp_path / "clients").read_text().split()[1])
    os.kill(client, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert "was the first to fail: it was lost: ssh to node" in errors
    assert process.returncode not in {0, None}
    assert all(has_ended(pid) for pid in pids)
