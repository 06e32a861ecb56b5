"""Two sites with two ranks each, a slow link and a cache of their own: one loses its power, and comes back."""

import contextlib
import json
import os
import shlex
import subprocess
import sys

import pytest

from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.distributed.elastic_jobs import ListedHosts
from tests.distributed.test_recipe_elastic import audit
from tests.support import warm_python
from tests.support.moto_process import KEY, SECRET, MotoServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RATE = 125_000_000  # bytes per second: 1 Gbit/s

# Enters the node whose address is the host, and runs the command with the streams of this process. As with ssh, the
# status is 255 if the host is lost.
SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
cat {folder}/$2.entrance >/dev/null 2>&1 || exit 255
nsenter --no-fork $(cat {folder}/$2.entrance) sh -c '"$@"; exit $?' sh sh -c "$3"
status=$?
[ $status -gt 128 ] && exit 255
exit $status
"""

# The training program, but rank 0 waits in step 9 for the loss of the other site, and in step 20 for its return.
PROGRAM = """
import json
import threading
import datasvc.trainer as hvd
from datasvc.trainer.job import runtime
from datasvc.trainer.recipes.elastic_memory import ElasticMemory

real_commit = ElasticMemory.commit_when_due
def commit_when_due(self, **facts):
    if hvd.rank() == 0 and hvd.size() == 4 and self._run.step == 9:
        print(json.dumps({"event": "waiting"}), flush=True)
    while hvd.rank() == 0 and (
        (hvd.size() == 4 and self._run.step == 9)
        or (hvd.size() == 2 and self._run.step == 20 and self._host_messages.empty())
    ):
        runtime.current_job().engine.check()
        threading.Event().wait(0.01)
    real_commit(self, **facts)
ElasticMemory.commit_when_due = commit_when_due

from datasvc.trainer.__main__ import main
main()
"""


class Sites:
    """Two nodes with disks of their own at one path, and an `ssh` that enters them."""

    def __init__(self, nodes, folder):
        self.nodes, self._folder = nodes, folder
        self.disk = folder / "disk"
        self.disk.mkdir()
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(SSH.format(folder=folder))
        ssh.chmod(0o755)
        for node in nodes:
            self.open(node)

    def open(self, node):
        """Give a node that has been booted its disk, its slow link and its entrance."""
        node.run("mount", "--bind", node.folder, self.disk)
        node.slow(RATE)
        (self._folder / f"{node.address}.entrance").write_text(shlex.join(node.entering()[1:]))

    def close(self, node):
        (self._folder / f"{node.address}.entrance").unlink()
        node.kill()

    def caches(self):
        """What the cache of each site has counted."""
        words = ["cache", "status", "--cache", str(self.disk / "cache"), "--json"]
        return [json.loads(node.datasvc(*words).finish())["counters"] for node in self.nodes]


@pytest.fixture
def store(network):
    server = MotoServer(address=network.origin_address).start()
    yield server
    server.close()


@pytest.fixture
def stopping():
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_site_is_lost_and_comes_back_and_each_shard_crosses_the_link_once_per_site(
    separate_network, store, tmp_path, digits_folder, monkeypatch, stopping
):
    environment = {
        "AWS_ENDPOINT_URL": store.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "HVD_DISCOVERY_INTERVAL": "0.1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("sites")
    repository = Repository.create("s3://sites/repo")
    report = ingest(repository, str(digits_folder), "digits", shard_bytes=64 << 10)
    sites = Sites(separate_network.nodes[:2], tmp_path)
    near, far = sites.nodes
    hosts = ListedHosts(tmp_path, f"{near.address}:2", f"{far.address}:2")
    # fmt: off
    command = [
        sys.executable, "-m", "datasvc.trainer.launch", "-np", "4", *hosts.options, "--min-num-proc", "2",
        "--blacklist-cooldown-range", "0.1", "0.1", "--no-prefix", "-x", "PYTHONPATH",
        *(word for name in environment for word in ("-x", name)),
        warm_python.command(), "-c", PROGRAM, "--data", "digits@1", "--repo", repository.url, "--name", "sites",
        "--size", "32", "--resize", "32", "--epochs", "3", "--global-batch", "96", "--report-every", "4",
        "--checkpoint-every", "1000", "--cache", str(sites.disk / "cache"), "--cache-budget", "1GB",
        "--ledger", str(tmp_path / "ledger"), "--elastic", "--sync", "diloco:4", "--commit-every", "1",
    ]
    # fmt: on
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    with (tmp_path / "errors").open("w") as errors:
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PATH": path}
        )
    stopping.callback(job.kill)
    rounds = {}
    for line in job.stdout:
        event = json.loads(line)
        if event["event"] == "round" and event["rank"] == 0:
            rounds[event["step"]] = event["size"]
        # Not earlier: gloo cannot end the collective of a save, in which ranks wait for a machine without power.
        if event["event"] == "waiting":
            sites.close(far)
        if event["event"] == "step" and event["step"] == 16:
            far.boot()
            sites.open(far)
    assert job.wait() == 0, (tmp_path / "errors").read_text()
    assert rounds == {0: 4, 8: 2, 20: 4}  # each begins at the end of a round of the averaging
    status, text = audit(tmp_path / "ledger")
    assert status == 0, text
    assert describe_model(repository, "sites").entry["step"] == 42
    num_shards = sum(report.num_shards.values())
    expected = {"misses": num_shards, "origin_bytes": report.size_bytes}
    assert [{name: counters[name] for name in expected} for counters in sites.caches()] == [expected] * 2
