"""Versions on the disks of nodes that are machines: one loses power and disk, and the store cannot be reached."""

import json
import shutil
import sys

import pytest

import datasvc
from tests.support.moto_process import KEY, SECRET, MotoServer


@pytest.fixture
def store(network):
    """A store that the nodes reach at the address of the origin."""
    server = MotoServer(address=network.origin_address).start()
    yield server
    server.close()


@pytest.mark.slow
def test_a_node_that_loses_power_and_disk_is_restored_from_the_others_while_the_store_cannot_be_reached(
    separate_network, store, monkeypatch
):
    nodes = separate_network.nodes[:3]
    environ = {
        "AWS_ENDPOINT_URL": store.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_MAX_ATTEMPTS": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("saves")
    url = "s3://saves/repo"
    datasvc.open(url, create=True)

    def start(action, port):
        return [
            node.start(
                sys.executable, "-m", "tests.cluster.checkpointing",
                action, rank, len(nodes), nodes[0].address, port, url,
                environ=environ,
            )
            for rank, node in enumerate(nodes)
        ]  # fmt: skip

    saved = [json.loads(program.read_line("saved")) for program in start("train", 29_500)]
    assert datasvc.open(url).models.versions("m") != []
    nodes[1].kill()
    shutil.rmtree(nodes[1].folder / "checkpoints")
    for node in (nodes[0], nodes[2]):
        node.kill()
    for node in nodes:
        node.boot()
        node.cut(separate_network.origin_address)
    restored = [json.loads(program.read_line("restored")) for program in start("restore", 29_501)]
    for rank, (_, step, digest, version, came) in enumerate(restored):
        assert (step, digest, version) == (4, saved[0][1], "m, step 4, on the nodes")
        assert (came["resident"] == 0) == (rank == 1)
