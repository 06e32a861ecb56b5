"""`datasvc doctor` with a repository, a cache and a node."""

import json
import os
import threading
import time

import pytest
from s3fs import S3FileSystem

from datasvc.doctor.stores import examine_node, examine_repository
from datasvc.errors import ConfigError
from datasvc.node.client import NodeClient
from datasvc.repository import Repository
from datasvc.repository.store.storage import Storage
from tests.cli.command import run
from tests.doctor.findings import by_check
from tests.node.conftest import RunningNode

TOKEN = "a-token-of-this-test"


def test_the_command_lists_findings_and_ends_well_without_a_problem(tmp_path):
    Repository.create(str(tmp_path / "repo"))
    words = ["doctor", "--repo", tmp_path / "repo", "--cache", tmp_path / "cache", "--json"]
    printed = json.loads(run(*words).stdout)
    levels = {finding["check"]: finding["level"] for finding in printed["findings"]}
    assert levels["repository locks"] == levels["cache locks"] == levels["version"] == "ok"
    assert printed["problems"] == 0
    assert not (tmp_path / "cache").exists()
    assert os.listdir(tmp_path / "repo") == ["datasvc.json"]


def test_a_problem_ends_the_command_with_1_and_says_what_to_do():
    done = run("doctor", "--node", "http://127.0.0.1:9")
    assert done.returncode == 1
    problem = done.stdout.partition("problem  node http://127.0.0.1:9: ")[2].splitlines()
    assert "does not respond" in problem[0]
    assert problem[1].startswith("         -> ")


def test_the_token_of_several_nodes_may_come_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "token", 0o600)
    writer = threading.Thread(target=lambda: (tmp_path / "token").write_text(TOKEN), daemon=True)
    writer.start()
    nodes = ["--node", "http://127.0.0.1:9", "--node", "http://127.0.0.2:9"]
    assert run("doctor", *nodes, "--token-file", tmp_path / "token").stdout.count("does not respond") == 2


def test_a_repository_is_read_written_and_locked(tmp_path):
    Repository.create(str(tmp_path))
    found = list(examine_repository(str(tmp_path)))
    assert [finding.level for finding in found] == ["ok"] * 6
    assert os.listdir(tmp_path) == ["datasvc.json"]


def test_a_folder_without_a_repository_is_a_warning(tmp_path):
    found = list(examine_repository(str(tmp_path / "missing")))
    assert [finding.level for finding in found] == ["warning"]
    assert by_check(examine_repository("memory://none-here/repo"))["repository clock"].level == "ok"


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_a_problem(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    # A driver of another test has the endpoint of that one.
    monkeypatch.setattr(S3FileSystem, "_cache", {})
    (finding,) = examine_repository("s3://bucket/repo")
    assert finding.level == "problem"
    assert "secret-of-the-test" not in finding.text


def test_the_client_of_a_store_is_named(s3_bucket, monkeypatch):
    url = f"{s3_bucket}/doctor"
    Repository.create(url)
    assert by_check(examine_repository(url))["repository client"].text == f"{url} is read by obstore"
    monkeypatch.setenv("DATASVC_STORE_CLIENT", "fsspec")
    text = by_check(examine_repository(url))["repository client"].text
    assert text.endswith("S3FileSystem of fsspec, because DATASVC_STORE_CLIENT is set to fsspec")


def refuse(*_):
    raise ConfigError("access denied")


def test_a_repository_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    Repository.create(str(tmp_path))
    monkeypatch.setattr(Storage, "create_temporary", refuse)
    found = list(examine_repository(str(tmp_path)))
    assert [finding.level for finding in found] == ["ok", "warning", "ok", "ok"]


def test_the_clock_of_a_store_is_compared(tmp_path, monkeypatch):
    Repository.create(str(tmp_path))
    monkeypatch.setattr(Storage, "now_s", lambda _: time.time() + 7200)
    finding = next(each for each in examine_repository(str(tmp_path)) if each.check == "repository clock")
    assert (finding.level, "ahead of" in finding.text) == ("problem", True)


@pytest.fixture
def node(tmp_path):
    running = RunningNode(folder=tmp_path / "cache", budget="10MB", token=TOKEN)
    yield running
    running.stop()


def test_a_node_responds_and_has_the_time_of_this_machine(node):
    found = by_check(examine_node("n", NodeClient(node.url, token=TOKEN)))
    assert {check: finding.level for check, finding in found.items()} == {"node n": "ok", "node n clock": "ok"}


def test_a_node_that_rejects_the_token_is_a_problem(node):
    (finding,) = examine_node("n", NodeClient(node.url))
    assert (finding.level, "--token-file" in finding.text) == ("problem", True)


def test_the_clock_of_a_node_is_compared(node, monkeypatch):
    monkeypatch.setattr(NodeClient, "clock_s", lambda _: time.time() - 60)
    found = by_check(examine_node("n", NodeClient(node.url, token=TOKEN)))
    assert (found["node n clock"].level, "behind" in found["node n clock"].text) == ("warning", True)
