"""The cluster itself: what its nodes are to each other, and that a dead one, a cut one and a slow one are that."""

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.cluster.network import refusal
from tests.cluster.node import ROOT
from tests.cluster.program import wait_for_end
from tools.bench.origin import Origin

on_both = pytest.mark.parametrize("network", ["namespaces", "loopback"], indirect=True)

# Answers every connection with what the file "disk" of its node has, after a line of input.
SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as asked:
        if asked.readline():
            connection.sendall(open("disk", "rb").read())
"""
# Asks such a server; prints how many bytes came, or the name of what went wrong.
CLIENT = """
import socket, sys
host, port, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
try:
    with socket.create_connection((host, port), timeout_s) as connection:
        print("connected", flush=True)
        connection.sendall(b"?\\n")
        with connection.makefile("rb") as stream:
            print(len(stream.read()))
except OSError as error:
    print(type(error).__name__)
"""
SLEEPER = "import time; print('sleeping', flush=True); time.sleep(600)"


def serve(node, num_bytes=10):
    """Start a server in a node; returns it and its port."""
    (node.folder / "disk").write_bytes(bytes(num_bytes))
    server = node.start(sys.executable, "-c", SERVER, node.address)
    return server, int(server.read_line())


def ask(client, server, port, timeout_s=30.0):
    """Ask the server at a node from another; returns the last word of what came of it."""
    return client.run(sys.executable, "-c", CLIENT, server.address, port, timeout_s).split()[-1]


@pytest.mark.slow
@on_both
def test_every_node_has_an_address_and_reaches_all_others(network):
    assert len({node.address for node in network.nodes}) == 4
    ports = [serve(node)[1] for node in network.nodes]
    for client in network.nodes:
        assert [ask(client, *at) for at in zip(network.nodes, ports, strict=True)] == ["10"] * 4


@pytest.mark.slow
@on_both
def test_nodes_reach_an_origin_outside_that_counts_what_each_takes(network, tmp_path):
    (tmp_path / "object").write_bytes(bytes(5000))
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    fetch = "import sys, urllib.request; print(len(urllib.request.urlopen(sys.argv[1]).read()))"
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        with Origin(f"http://127.0.0.1:{store.server_port}", host=network.origin_address) as origin:
            for node in network.nodes:
                assert node.run(sys.executable, "-c", fetch, f"{origin.url}/object") == "5000\n"
        store.shutdown()
    assert origin.num_bytes("/object") == 4 * 5000
    if network.is_separate:
        assert [exchange.client for exchange in origin.exchanges()] == [node.address for node in network.nodes]


@on_both
def test_a_node_that_is_killed_is_gone_with_its_processes_and_comes_back_with_its_disk(network):
    node, other = network.nodes[:2]
    _, port = serve(node)
    assert len(node.processes()) == 1
    pidfds = [os.pidfd_open(pid) for pid in node.processes()]
    address = node.address
    node.kill()
    assert all(map(wait_for_end, pidfds))
    assert ask(other, node, port, timeout_s=0.3) in {"TimeoutError", "OSError", "ConnectionRefusedError"}
    node.boot()
    assert node.address == address
    assert node.processes() == []
    assert (node.folder / "disk").read_bytes() == bytes(10)
    assert ask(other, node, serve(node)[1]) == "10"
    for pidfd in pidfds:
        os.close(pidfd)


def test_a_killed_machine_says_nothing_to_those_it_talked_to(separate_network):
    node, other = separate_network.nodes[:2]
    _, port = serve(node)
    waiting = (
        "import socket, sys; c = socket.create_connection((sys.argv[1], int(sys.argv[2]))); "
        "print('connected', flush=True); sys.stdin.read(); c.settimeout(0.3); c.recv(1)"
    )
    client = other.start(sys.executable, "-c", waiting, node.address, port)
    client.read_line("connected")
    node.kill()
    assert client.wait() == 1
    assert "TimeoutError" in client.errors()


@pytest.mark.slow
@on_both
def test_a_frozen_node_holds_its_connections_and_answers_once_thawed(network):
    node, other = network.nodes[:2]
    server, port = serve(node)
    node.freeze()
    assert ask(other, node, port, timeout_s=0.3) == "TimeoutError"
    client = other.start(sys.executable, "-c", CLIENT, node.address, port, 30)
    client.read_line("connected")
    node.thaw()
    assert client.finish() == "10\n"
    for _ in range(20):
        node.freeze()
        node.thaw()
    assert ask(other, node, port) == "10"
    server.kill()


def test_cut_groups_lose_each_other_and_no_one_else_until_healed(separate_network):
    network = separate_network
    ports = [serve(node)[1] for node in network.nodes]
    a, b, c, d = network.nodes
    network.partition([a, b], [c, d, network.origin_address])
    assert ask(a, b, ports[1]) == ask(d, c, ports[2]) == "10"
    for client, server, port in ((a, c, ports[2]), (d, b, ports[1])):
        assert ask(client, server, port, timeout_s=0.3) == "TimeoutError"
    network.heal()
    assert ask(a, c, ports[2]) == ask(d, b, ports[1]) == "10"


@pytest.mark.parametrize("slow_one", ["server", "client"])
def test_a_slow_node_gets_and_gives_no_more_than_its_rate(separate_network, slow_one):
    client, server = separate_network.nodes[:2]
    _, port = serve(server, num_bytes=1 << 20)
    (client if slow_one == "client" else server).slow(2e6)
    # The least time is a law and no measurement. The bucket holds 128 kB, one for each way.
    start = time.monotonic()
    assert ask(client, server, port) == str(1 << 20)
    assert time.monotonic() - start >= ((1 << 20) - (128 << 10)) / 2e6
    (client if slow_one == "client" else server).slow(None)
    assert ask(client, server, port) == str(1 << 20)


def test_networks_of_runs_at_the_same_time_are_apart(separate_network, tmp_path):
    from tests.cluster.namespaces import NamespaceNetwork

    (tmp_path / "more").mkdir()
    with NamespaceNetwork(tmp_path / "more", 2) as other:
        assert not {node.address for node in other.nodes} & {node.address for node in separate_network.nodes}
        _, port = serve(other.nodes[0])
        assert ask(separate_network.nodes[0], other.nodes[0], port, timeout_s=0.3) != "10"
        assert ask(other.nodes[1], other.nodes[0], port) == "10"


def test_nothing_is_left_when_the_run_is_killed_not_even_of_a_frozen_node(separate_network, tmp_path):
    program = f"""
import pathlib, sys
from tests.cluster.namespaces import NamespaceNetwork
network = NamespaceNetwork(pathlib.Path({str(tmp_path)!r}), 2).__enter__()
for node in network.nodes:
    node.start(sys.executable, "-c", {SLEEPER!r}).read_line("sleeping")
network.nodes[0].freeze()
print([pid for node in network.nodes for pid in node.processes()], flush=True)
sys.stdin.read()
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = json.loads(run.stdout.readline())
    pidfds = [os.pidfd_open(pid) for pid in pids]
    assert len(pidfds) == 2
    run.kill()
    run.communicate()
    assert all(map(wait_for_end, pidfds))
    for pidfd in pidfds:
        os.close(pidfd)


def test_a_machine_that_refuses_namespaces_says_what_it_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(tmp_path / "a").startswith("unshare: ")
    (tmp_path / "unshare").write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    assert "Operation not permitted" in refusal(tmp_path / "b")
