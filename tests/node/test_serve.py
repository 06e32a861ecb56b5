"""A node as a process, and who may talk to it."""

import json
import logging
import os
import platform
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import lmdb
import pytest
from prometheus_client.parser import text_string_to_metric_families

from datasvc.cache.catalogue.catalogue import Catalogue
from datasvc.cache.catalogue.tables import describe_failure
from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.node.client import NodeClient
from datasvc.node.http import connection_limit
from datasvc.node.settings import NodeSettings
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.node.conftest import OBJECT_BYTES
from tests.samples import write_folder

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef0123456789abcdef"


def datasvc(*arguments, **environment):
    return [sys.executable, "-m", "datasvc.cli.main", *map(str, arguments)], {
        "cwd": ROOT,
        "text": True,
        "env": {**os.environ, **environment},
    }


def run_to_end(*arguments, **environment):
    command, options = datasvc(*arguments, **environment)
    return subprocess.run(command, **options, capture_output=True, check=False, timeout=60)


@pytest.fixture
def serving(origin, tmp_path):
    """Start `datasvc serve` with more options; returns the process and its address."""
    processes = []

    def start(*options, stderr=None, **environment):
        arguments = (
            "--cache",
            tmp_path / "cache",
            "--repo",
            origin[0].url,
            "--budget",
            "10MB",
            "--port",
            0,
            "--json",
        )
        command, settings = datasvc("serve", *arguments, *options, **environment)
        process = subprocess.Popen(command, **settings, stdout=subprocess.PIPE, stderr=stderr)
        processes.append(process)
        return process, json.loads(process.stdout.readline())["url"]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_node_serves_until_a_stop_signal(serving, origin):
    repository, infos, contents = origin
    process, url = serving()
    query = f"?origin={repository.url}&size={OBJECT_BYTES}"
    with urllib.request.urlopen(f"{url}/objects/{infos[0].digest}{query}") as answer:
        assert answer.read() == contents[0]
    assert json.load(urllib.request.urlopen(f"{url}/healthz")) == {"status": "ok"}
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("level", ["info", pytest.param("error", marks=pytest.mark.slow)])
def test_a_node_logs_its_start_its_jobs_and_its_end(serving, origin, folder, tmp_path, level):
    repository = origin[0]
    ingest(repository, str(folder), "pets", shard_bytes=2000)
    ingest(repository, str(write_folder(tmp_path / "more", {"train": {"a": 3}}, start=100)), "lost")
    for info in open_dataset(repository, "lost")["train"].table.shards():
        repository.objects.local_path(info.digest).unlink()
    with (tmp_path / "log").open("w") as log:
        process, url = serving("--log-level", level, stderr=log)
    NodeClient(url).stage("pets", poll_s=0.01)
    with pytest.raises(NotFoundError):
        NodeClient(url).stage("lost", poll_s=0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \S+ [A-Z]+ datasvc\.node\.", line) for line in lines), lines
    steps = ["serving", "has begun", "is done", "has begun", "has failed", "stopping", "stopped"]
    assert [next(step for step in steps if step in line) for line in lines] == (
        steps if level == "info" else ["has failed"]
    )


@pytest.mark.slow
def test_a_stopping_node_ends_what_it_sends(serving, origin):
    repository, _, _ = origin
    info = repository.objects.put(bytes(8_000_000))
    process, url = serving("--peer-rate", "8MB")
    with urllib.request.urlopen(f"{url}/objects/{info.digest}?origin={repository.url}&size=8000000") as answer:
        received = len(answer.read(10))
        process.send_signal(signal.SIGTERM)
        received += len(answer.read())
    assert received == 8_000_000
    assert process.wait() == 0


@pytest.mark.slow
def test_of_two_nodes_on_one_folder_the_second_is_refused(serving, origin, tmp_path):
    process, _ = serving()
    second = run_to_end("serve", "--cache", tmp_path / "cache", "--repo", origin[0].url, "--port", 0)
    assert (second.returncode, f"process {process.pid} already serves" in second.stderr) == (2, True), second.stderr
    process.kill()
    process.wait()
    again, _ = serving()
    assert again.poll() is None


@pytest.mark.slow
def test_an_address_that_is_taken_is_a_clear_error(origin, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = ("--cache", tmp_path / "cache", "--repo", origin[0].url, "--budget", "10MB")
        done = run_to_end("serve", *where, "--port", port)
    assert (done.returncode, "--port" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


@pytest.mark.slow
def test_other_machines_are_let_in_only_with_a_token(origin, tmp_path):
    where = ("--cache", tmp_path / "cache", "--repo", origin[0].url, "--budget", "10MB")
    done = run_to_end("serve", *where, "--host", "0.0.0.0", "--port", 0)
    assert (done.returncode, "--token-file" in done.stderr) == (2, True)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_repository_that_is_not_there_is_a_clear_error(tmp_path):
    done = run_to_end("serve", "--cache", tmp_path / "cache", "--repo", tmp_path / "none", "--budget", "1MB")
    assert (done.returncode, "no repository" in done.stderr) == (1, True)


def test_a_token_is_asked_for_everything_but_health(run, origin):
    repository, infos, _ = origin
    node = run(repositories=(repository.url,), token=TOKEN)
    paths = ("/status", "/metrics", "/stage", f"/objects/{infos[0].digest}", "/objects/x", "/nowhere")
    for path in paths:
        assert node.get(path).status == 401
        refused = node.get(path, Authorization="Bearer 0123456789abcdef0123456789abcdeF")
        assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert node.ask("POST", "/stage", {"ref": "x"}).status == 401
    assert [node.get(path, Authorization=f"Bearer {TOKEN}").status for path in paths] == [
        200,
        200,
        200,
        404,
        400,
        404,
    ]
    assert node.get("/healthz").status == 200


@pytest.mark.slow
def test_the_command_line_takes_its_token_from_the_environment_too(serving):
    _, url = serving(DATASVC_TOKEN=TOKEN)
    assert run_to_end("top", "--node", url, "--json").returncode == 2
    seen = run_to_end("top", "--node", url, "--json", DATASVC_TOKEN=TOKEN)
    assert json.loads(seen.stdout)["cache"]["budget_bytes"] == 10_000_000


def test_with_a_certificate_a_node_talks_https(run, origin, certificate):
    repository, infos, contents = origin
    node = run(repositories=(repository.url,), certificate=certificate[0], certificate_key=certificate[1])
    assert node.url.startswith("https://")
    trust = ssl.create_default_context(cafile=certificate[0])
    url = f"{node.url}/objects/{infos[0].digest}?origin={repository.url}&size={OBJECT_BYTES}"
    with urllib.request.urlopen(url, context=trust) as answer:
        assert answer.read() == contents[0]
    with pytest.raises(OSError, match="certificate"):
        urllib.request.urlopen(url)
    with pytest.raises(ConnectionError):
        node.get("/healthz")


@pytest.mark.parametrize("rate", [None, 40_000_000])
def test_an_object_of_many_writes_comes_whole_over_https(run, certificate, tmp_path, rate):
    repository = Repository.create(str(tmp_path / "origin"))
    content = os.urandom(11 << 20)
    info = repository.objects.put(content)
    pair = {"certificate": certificate[0], "certificate_key": certificate[1]}
    node = run(repositories=(repository.url,), budget="100MB", peer_rate_bytes_s=rate, **pair)
    trust = ssl.create_default_context(cafile=certificate[0])
    url = f"{node.url}/objects/{info.digest}?origin={repository.url}&size={len(content)}"
    with urllib.request.urlopen(url, context=trust, timeout=20) as answer:
        assert answer.read() == content


def test_a_certificate_that_cannot_be_used_is_a_clear_error(run, certificate, tmp_path):
    key = tmp_path / "encrypted.key"
    command = ["openssl", "ec", "-in", certificate[1], "-aes256", "-passout", "pass:secret", "-out", key]
    subprocess.run(command, check=True, capture_output=True)
    for wrong in (key, certificate[0], tmp_path / "missing"):
        with pytest.raises(ConfigError, match="certificate"):
            run(certificate=certificate[0], certificate_key=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"max_connections": 0},
        {"peer_rate_bytes_s": 0},
        {"origin_rate_bytes_s": 0},
        {"grace_s": -1},
        {"certificate": Path("x")},
        {"certificate_key": Path("x")},
        {"own_url": "http://a:1"},
        {"host": "0.0.0.0"},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong, tmp_path):
    with pytest.raises(ConfigError):
        NodeSettings(folder=tmp_path, **wrong)


def head_of(connection, path):
    """Send a request over a plain socket; return the beginning of the answer."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection.recv(100)


def test_connections_above_the_bound_are_refused_at_once_but_for_health(run, origin):
    node = run(max_connections=2)
    idle = [node.connect() for _ in range(2)]
    for connection in idle:
        connection.request("GET", "/status")
        assert connection.getresponse().read()
    where = idle[0].host, idle[0].port
    with socket.create_connection(where) as third, socket.create_connection(where) as fourth:
        assert head_of(third, "/status").startswith(b"HTTP/1.1 503 ")
        assert head_of(fourth, "/healthz").startswith(b"HTTP/1.1 200 ")
        while fourth.recv(1000):  # closed after the answer
            pass
    idle.pop().close()
    idle[0].request("GET", "/status")
    status = json.loads(idle[0].getresponse().read())
    assert status["serving"]["num_refused_connections"] == 1
    idle[0].close()


def is_open(connection):
    """Return whether a connection that gets no bytes is open after the node has answered another one."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def connect_silently(node, source, opened):
    where = urlsplit(node.url).hostname, urlsplit(node.url).port
    connection = opened.enter_context(socket.create_connection(where, source_address=(source, 0)))
    connection.sendall(b"GET /st")
    return connection


def test_connections_without_a_request_keep_no_client_out(run):
    node = run(max_connections=4, token=TOKEN)
    with ExitStack() as opened:
        silent = [connect_silently(node, "127.0.0.2", opened) for _ in range(8)]
        assert node.get("/healthz").status == 200
        assert node.get("/status", Authorization=f"Bearer {TOKEN}").status == 200
        assert node.get("/status").status == 401
        assert list(map(is_open, silent)) == [False] * 5 + [True] * 3  # the oldest made place for others


def test_of_a_stranger_who_sends_no_request_the_oldest_connections_are_closed_but_in_a_burst(run, monkeypatch):
    monkeypatch.setattr(connection_limit, "_MAX_PENDING_PER_ADDRESS", 3)
    node = run()
    with ExitStack() as opened:
        burst = [connect_silently(node, "127.0.0.2", opened) for _ in range(8)]
        assert node.get("/healthz").status == 200
        assert all(map(is_open, burst))
        monkeypatch.setattr(connection_limit, "_BURST_S", 0)
        later = [connect_silently(node, "127.0.0.2", opened) for _ in range(2)]
        other = connect_silently(node, "127.0.0.3", opened)
        assert node.get("/healthz").status == 200
        assert list(map(is_open, [*burst, *later, other])) == [False] * 2 + [True] * 9


def test_a_connection_without_a_first_head_is_closed(run, monkeypatch):
    monkeypatch.setattr(connection_limit, "FIRST_HEAD_S", 0.01)
    node = run()
    with socket.create_connection((urlsplit(node.url).hostname, urlsplit(node.url).port)) as silent:
        silent.sendall(b"GET /status HTTP/1.1\r\n")
        with suppress(ConnectionResetError):
            assert silent.recv(100) == b""


def test_a_client_without_the_token_keeps_no_connection(run):
    node = run(token=TOKEN)
    with socket.create_connection((urlsplit(node.url).hostname, urlsplit(node.url).port)) as client:
        assert head_of(client, "/status").startswith(b"HTTP/1.1 401 ")
        while client.recv(1000):
            pass


@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:80", "[::1", "10.0.0.1:8765", ""])
def test_without_a_token_a_request_for_another_host_is_refused(run, host):
    node = run()
    assert node.get("/status", Host=host).status == 421
    assert node.ask("POST", "/stage", {"ref": "pets"}, Host=host).status == 421


@pytest.mark.parametrize(
    "host", ["localhost:1", "127.0.0.1", "127.9.9.9:1", "[::1]:8765", socket.gethostname().upper()]
)
def test_without_a_token_a_request_for_this_machine_is_answered(run, host):
    assert run().get("/status", Host=host).status == 200


def test_with_a_token_any_host_is_answered(run):
    assert run(token=TOKEN).get("/status", Host="node.example", Authorization=f"Bearer {TOKEN}").status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nbad header\n\r\n\r\n",
        (
            b"POST /stage HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n"
        ),
    ],
    ids=str,
)
def test_a_request_that_is_not_http_is_one_line_in_the_log_at_most(run, caplog, request_bytes):
    caplog.set_level(logging.DEBUG)
    node = run()
    with socket.create_connection((urlsplit(node.url).hostname, urlsplit(node.url).port)) as client:
        client.sendall(request_bytes)
        assert client.recv(100)[8:13] == b" 400 "
    node.stop()
    lines = [record for record in caplog.records if record.name not in ("asyncio", "datasvc.node.server")]
    assert len(lines) <= 1, lines
    assert all(record.exc_info is None and "\n" not in record.getMessage() for record in lines)


def test_a_node_whose_catalogue_cannot_be_used_any_more_ends_with_an_error(node, monkeypatch):
    def panic(*_arguments):
        raise describe_failure(Path("catalogue"), lmdb.PanicError("MDB_PANIC"))

    monkeypatch.setattr(Catalogue, "read", panic)
    answer = node.get("/status")
    assert (answer.status, "start this process again" in answer.json["error"]) == (503, True)
    node.wait()
    assert isinstance(node.error, UnavailableError)
    assert "remove that folder" not in str(node.error)


def test_a_staging_job_that_finds_such_a_catalogue_ends_the_node_too(run, origin, folder, monkeypatch):
    def panic(*_arguments, **_options):
        raise describe_failure(Path("catalogue"), lmdb.PanicError("MDB_PANIC"))

    ingest(origin[0], str(folder), "pets")
    node = run(repositories=(origin[0].url,))
    monkeypatch.setattr(Catalogue, "reserve", panic)
    assert node.ask("POST", "/stage", {"ref": "pets"}).status == 202
    node.wait()
    assert isinstance(node.error, UnavailableError)


def test_metrics_are_what_prometheus_reads(node, origin):
    repository, infos, _ = origin
    node.get_object(infos[3], repository)
    answer = node.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert samples["datasvc_cache_origin_bytes_total"] == 3 * OBJECT_BYTES
    assert samples["datasvc_sent_bytes_total"] == OBJECT_BYTES
    assert samples["datasvc_cache_budget_bytes"] == 10_000_000
    assert samples["datasvc_cache_num_resident"] == 3
    assert 'datasvc_tenant_used_bytes{tenant="default"}' in answer.body.decode()
    version = node.get("/status").json["version"]
    assert (
        f'datasvc_build_info{{python="{platform.python_version()}",version="{version}"}} 1.0' in answer.body.decode()
    )


def test_the_status_names_caches_jobs_and_no_secret(run, origin, tmp_path):
    node = run(repositories=(origin[0].url,), token=TOKEN)
    answer = node.get("/status", Authorization=f"Bearer {TOKEN}")
    assert answer.json["cache"]["folder"] == str(tmp_path / "cache")
    assert answer.json["process"] == os.getpid()
    assert TOKEN not in answer.body.decode() + repr(node.settings)


def test_what_does_not_exist_is_answered_in_json(node):
    assert (node.get("/nowhere").status, "error" in node.get("/nowhere").json) == (404, True)
    refused = node.ask("POST", "/status", {})
    assert (refused.status, "GET" in refused.headers["Allow"]) == (405, True)
