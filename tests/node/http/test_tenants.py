"""Tenants of a node, and one of them who tries to read what is not theirs."""

import json

import pytest

from datasvc.cache import Cache
from datasvc.errors import ConfigError, NotFoundError
from datasvc.node.client import NodeClient, find_resident
from datasvc.node.http.auth import Tenant, load_tenants
from datasvc.node.settings import NodeSettings
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.testing import small_dataset

OPERATOR, VISION, SPEECH = (name * 16 for name in "ovs")


@pytest.fixture
def repositories(tmp_path):
    """Two repositories, each with a data set of its own."""
    found = []
    for size, name in ((32, "faces"), (40, "voices")):
        repository = Repository.create(str(tmp_path / name))
        small_dataset(repository, name, samples=16, image_size=size)
        found.append(repository)
    return found


@pytest.fixture
def node(run, repositories):
    faces, voices = (repository.url for repository in repositories)
    tenants = (Tenant("vision", VISION, (faces,)), Tenant("speech", SPEECH, (voices,)))
    return run(repositories=(faces, voices), token=OPERATOR, tenants=tenants)


def shard_of(repository, name):
    return open_dataset(repository, name)["train"].table.shard(0)


def get(node, token, digest, **query):
    words = "&".join(f"{name}={value}" for name, value in query.items())
    return node.get(f"/objects/{digest}?{words}", Authorization=f"Bearer {token}")


def test_a_tenant_stages_and_reads_its_own_data_on_its_own_quota(node, repositories):
    faces, _ = repositories
    NodeClient(node.url, token=VISION).stage("faces", repo=faces.url, poll_s=0.001)
    shard = shard_of(faces, "faces")
    answer = get(node, VISION, shard.digest, origin=faces.url, fetch=0)
    assert (answer.status, len(answer.body)) == (200, shard.size_bytes)
    with Cache(node.settings.folder) as cache:
        used = {name: usage.used_bytes for name, usage in cache.status().tenants.items() if usage.used_bytes}
    assert used.keys() == {"vision"}


def test_a_tenant_cannot_read_what_another_one_has_staged(node, repositories):
    faces, voices = repositories
    NodeClient(node.url, token=SPEECH).stage("voices", repo=voices.url, poll_s=0.001)
    shard = shard_of(voices, "voices")
    for query in (
        {},  # the digest alone, of a resident object
        {"fetch": 0},
        {"origin": faces.url, "size": shard.size_bytes},  # a repository of its own, which lacks the object
        {"origin": voices.url, "size": shard.size_bytes},  # one of another tenant
        {"origin": f"{faces.url}/../voices", "size": shard.size_bytes},
    ):
        assert get(node, VISION, shard.digest, **query).status == 404, query
        head = node.ask("HEAD", f"/objects/{shard.digest}", Authorization=f"Bearer {VISION}")
        check = node.ask("POST", f"/objects/{shard.digest}/check", Authorization=f"Bearer {VISION}")
        assert (head.status, check.status) == (404, 404)
    assert get(node, OPERATOR, shard.digest).status == 200


def test_a_tenant_neither_sees_nor_ends_jobs_of_another_one(node, repositories):
    _, voices = repositories
    job = NodeClient(node.url, token=SPEECH).stage("voices", repo=voices.url, poll_s=0.001)
    mine = {"Authorization": f"Bearer {VISION}"}
    assert node.get("/stage", **mine).json == {"jobs": []}
    for method in ("GET", "DELETE"):
        assert node.ask(method, f"/stage/{job['id']}", **mine).status == 404
    with pytest.raises(NotFoundError, match="does not read"):
        NodeClient(node.url, token=VISION).stage("voices", repo=voices.url)
    for path in ("/status", "/metrics"):
        assert node.get(path, **mine).status == 403
        assert node.get(path, Authorization=f"Bearer {OPERATOR}").status == 200
    assert node.get("/stage", Authorization="Bearer " + "x" * 16).status == 401


def test_a_tenant_learns_only_what_is_there_of_its_own_data(node, repositories):
    faces, _ = repositories
    NodeClient(node.url, token=VISION).stage("faces", repo=faces.url, poll_s=0.001)
    found = {
        token: find_resident(faces, "faces", {node.url: NodeClient(node.url, token=token)})["nodes"][0]["share"]
        for token in (VISION, SPEECH, OPERATOR)
    }
    assert found == {VISION: 1.0, SPEECH: 0.0, OPERATOR: 1.0}


def write(path, content, mode=0o600):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return path


def test_the_file_of_tenants_is_checked(tmp_path):
    good = {"vision": {"token": VISION, "repositories": ["s3://a/b"]}}
    path = tmp_path / "tenants"
    assert load_tenants(write(path, good)) == (Tenant("vision", VISION, ("s3://a/b",)),)
    for content, message in (
        ("no JSON", "is not a file of tenants"),
        ([], "is not a file of tenants"),
        ({"vision": {"token": VISION}}, "is not a file of tenants"),
        ({"vision": {"token": VISION, "repositories": []}}, "has no list of repositories"),
        ({"vision": {"token": "short", "repositories": ["a"]}}, "at least 16"),
        ({"vision": {**good["vision"], "quota": 1}}, "unknown fields: quota"),
        ({**good, "speech": good["vision"]}, "the same token"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tenants(write(path, content))
    with pytest.raises(ConfigError, match="all users"):
        load_tenants(write(path, good, 0o644))


def test_tenants_need_a_token_of_the_node_that_is_not_theirs(tmp_path):
    tenants = (Tenant("vision", VISION, ("a",)),)
    with pytest.raises(ConfigError, match="--token-file"):
        NodeSettings(folder=tmp_path, tenants=tenants)
    with pytest.raises(ConfigError, match="token of the node"):
        NodeSettings(folder=tmp_path, tenants=tenants, token=VISION)
