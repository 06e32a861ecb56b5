"""`datasvc stage --node`, and peers with certificates of their own: what a person or a script asks of a node."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from datasvc.cache import Cache
from datasvc.errors import CacheFullError, ConfigError, DatasvcError, NotFoundError, UnavailableError
from datasvc.node.client import NodeClient
from datasvc.node.settings import open_peers
from datasvc.node.transfers.staging_jobs import StageJob
from datasvc.progress import SourceCounter
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.views.named import save_view
from tests.cli.command import run as run_command
from tests.node.conftest import OBJECT_BYTES

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def pets(folder, tmp_path):
    """A repository with a data set of several shards."""
    repository = Repository.create(str(tmp_path / "pets"))
    ingest(repository, str(folder), "pets", shard_bytes=2000)
    return repository


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--node", "--url"])
def test_a_data_set_is_staged_by_a_running_node(run, pets, token_file, option):
    node = run(repositories=(pets.url,), token=TOKEN)
    words = ("stage", "pets@1", option, node.url, "--token-file", token_file)
    staged = run_command(*words)
    assert staged.returncode == 0, staged.stderr
    assert f"staged pets@1 on {node.url}: " in staged.stdout
    (again,) = json.loads(run_command(*words, "--json").stdout)
    assert again["bytes"]["resident"] == again["total_bytes"] > 0
    with Cache(node.settings.folder) as cache:
        assert cache.status().num_resident > 1


def test_how_much_of_a_version_each_node_has_says_where_to_start_a_job(run, pets, token_file):
    empty, full, lost = (run(name, repositories=(pets.url,), token=TOKEN) for name in ("empty", "full", "lost"))
    NodeClient(full.url, token=TOKEN).stage("pets", split="train", poll_s=0.001)
    lost.stop()
    nodes = [empty.url, lost.url, full.url]
    words = ("cache", "where", "pets", "--repo", pets.url, "--token-file", token_file)
    words += tuple(word for url in nodes for word in ("--node", url))
    found = json.loads(run_command(*words, "--json").stdout)
    dataset = open_dataset(pets, "pets")
    train, val = (sum(shard.size_bytes for shard in dataset[name].table.shards()) for name in ("train", "val"))
    assert (found["dataset"], found["num_asked"]) == ("pets@1", found["num_shards"])
    first, *others = found["nodes"]
    share = round(train / (train + val), 4)
    num_shards = dataset["train"].table.num_shards
    assert first == {"node": full.url, "shards": num_shards, "bytes": train, "share": share}
    errors = {node["node"]: node.get("error") for node in others if not node["bytes"]}
    assert errors == {empty.url: None, lost.url: errors[lost.url]}
    assert "does not respond" in errors[lost.url]
    text = run_command(*words).stdout
    assert f"{share:.1%}" in text
    wrong = run_command(*words[:5], "--node", full.url)
    assert (wrong.returncode, "rejects the token" in wrong.stderr) == (2, True)


def test_the_bytes_of_a_staging_job_are_its_progress(run, pets):
    node = run(repositories=(pets.url,))
    progress = SourceCounter()
    job = NodeClient(node.url).stage("pets", split="train", progress=progress, poll_s=0.001)
    assert progress.bytes_by_source.total() == job["total_bytes"] == job["done_bytes"]
    assert job["split"] == "train"


@pytest.mark.parametrize(
    ("wanted", "kind", "message"),
    [
        ({"ref": "none"}, NotFoundError, "responds 404 Not Found: .*none"),
        ({"ref": "pets", "split": "test"}, NotFoundError, "has no split"),
        ({"ref": "pets", "repo": "/nowhere"}, NotFoundError, "does not read /nowhere"),
        ({"ref": "Pets!"}, ConfigError, "responds 400 Bad Request: "),
        ({"ref": "pets@1[label = 0]"}, ConfigError, r"pets@1\[label = 0\] has a condition, and a node stages stored"),
    ],
    ids=str,
)
def test_the_error_of_a_node_that_cannot_stage_is_passed_on(run, pets, wanted, kind, message):
    node = run(repositories=(pets.url,))
    with pytest.raises(kind, match=message):
        NodeClient(node.url).stage(**wanted)


def test_a_node_stages_the_shards_of_a_stored_view(run, pets):
    split = open_dataset(pets, "pets")["train"]
    first = split.where(f"key = '{split[0]['key']}'")
    save_view(pets, "first", first)
    node = run(repositories=(pets.url,))
    job = NodeClient(node.url).stage("pets[first]", split="train")
    assert (job["ref"], job["total_bytes"]) == (f"pets@1[{first.digest}]", first.table.size_bytes)
    assert first.table.size_bytes < split.table.size_bytes


@pytest.mark.parametrize("num_lost", [4, 5])
def test_a_lost_request_for_the_state_of_a_job_is_repeated(run, pets, monkeypatch, num_lost):
    node = run(repositories=(pets.url,))
    client = NodeClient(node.url)
    request, lost = client._request, []

    def losing(method, path, body=None):
        if method == "GET" and len(lost) < num_lost:
            lost.append(path)
            raise UnavailableError("it does not respond")
        return request(method, path, body)

    monkeypatch.setattr(client, "_request", losing)
    if num_lost < 5:
        assert client.stage("pets", poll_s=0.001)["state"] == "done"
    else:
        with pytest.raises(UnavailableError, match=r"5 requests in a row failed\. The staging may still run there"):
            client.stage("pets", poll_s=0.001)


def test_a_job_that_fails_is_the_error_that_the_node_reports(run, pets):
    node = run(repositories=(pets.url,), budget=4096)
    with pytest.raises(CacheFullError, match=f"staging pets on {node.url} failed: "):
        NodeClient(node.url).stage("pets", poll_s=0.001)


def test_a_wrong_token_and_a_node_that_is_not_there_are_clear_errors(run, pets):
    node = run(repositories=(pets.url,), token=TOKEN)
    with pytest.raises(ConfigError, match="rejects the token"):
        NodeClient(node.url, token=TOKEN[::-1]).stage("pets")
    with pytest.raises(UnavailableError, match="does not respond"):
        NodeClient("http://127.0.0.1:9").stage("pets")


@pytest.fixture
def endless_jobs(monkeypatch):
    """Let jobs run until they are cancelled; the event is set when one has begun."""
    begun = threading.Event()

    def run_until_cancelled(job, _cache):
        job._begin()
        begun.set()
        job.stop.wait()
        job._end("cancelled", None)

    monkeypatch.setattr(StageJob, "run", run_until_cancelled)
    return begun


@pytest.mark.usefixtures("endless_jobs")
def test_an_interrupt_cancels_the_job(run, pets, monkeypatch):
    node = run(repositories=(pets.url,))

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("datasvc.node.client.time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        NodeClient(node.url).stage("pets")
    assert node.wait_for(lambda status: status["jobs"][0]["state"] == "cancelled")


def test_a_job_that_another_client_cancels_is_an_error(run, pets, endless_jobs):
    node = run(repositories=(pets.url,))

    def cancel():
        endless_jobs.wait()
        (job,) = node.get("/stage").json["jobs"]
        node.ask("DELETE", f"/stage/{job['id']}")

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(DatasvcError, match="was cancelled"):
        NodeClient(node.url).stage("pets", poll_s=0.01)
    thread.join()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["s3://b/x", "--node", "http://n:1"], "leave out --node for URLs of files"),
        (["pets", "--node", "http://n:1", "--budget", "1GB"], "--budget does not apply with --node"),
        (["pets", "--node", "http://n:1", "--peers", "http://m:1"], "--peers does not apply with --node"),
        (["pets", "--node", "http://n:1", "--cache", "here"], "--cache does not apply with --node"),
        (["pets", "--node", "http://n:1", "--tenant", "a"], "--tenant does not apply with --node"),
        (["pets", "--node", "http://n:1", "--tls-name", "x"], "--tls-name does not apply to http://n:1, .* no TLS"),
        (["pets", "--node", "http://n:1", "--ca", "ca.pem"], "--ca does not apply to http://n:1"),
        (["pets", "--repo", "r", "--cache", "c", "--tls-name", "x"], "--tls-name is for .*there is no --peers"),
        (["pets", "--repo", "r", "--cache", "c", "--token-file", "t"], "--token-file is for .*there is no --peers"),
        (["s3://b/x", "--cache", "c", "--peers", "http://m:1"], "--peers does not apply to URLs"),
        (["pets"], "--cache FOLDER .*or --node URL"),
        (["pets", "--node", "n"], "is not a valid node"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(words, message):
    refused = run_command("stage", *words, DATASVC_CACHE=None, DATASVC_PEERS=None)
    assert refused.returncode == 2
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refused.stderr)


def test_a_pin_without_peers_refuses_what_is_for_peers():
    refused = run_command("cache", "pin", "pets", "--repo", "r", "--cache", "c", "--ca", "f", DATASVC_PEERS=None)
    assert refused.returncode == 2
    assert "--ca is for the connections to peers" in refused.stderr


@pytest.fixture
def elsewhere(monkeypatch):
    """Let every node be on another machine."""
    monkeypatch.setattr("datasvc.cache.peers.membership.find_local_url", lambda _urls: None)


def test_the_name_in_a_nodes_certificate_may_be_given(run, pets, certificate):
    secrets = {"certificate": certificate[0], "certificate_key": certificate[1], "token": TOKEN}
    url = run(repositories=(pets.url,), **secrets).url
    for words in (["stage", "pets", "--node", url], ["top", "--node", url]):
        command = [*words, "--ca", certificate[0]]
        assert run_command(*command, "--tls-name", "localhost", DATASVC_TOKEN=TOKEN).returncode == 0
        other = run_command(*command, DATASVC_TLS_NAME="other", DATASVC_TOKEN=TOKEN)
        assert "certificate is not valid for 'other'" in other.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_peers_with_a_certificate_of_their_own_authority_are_read_with_ca(
    run, pets, certificate, tmp_path, token_file
):
    secrets = {"certificate": certificate[0], "certificate_key": certificate[1], "token": TOKEN}
    node = run(repositories=(pets.url,), **secrets)
    run_command("stage", "pets", "--node", node.url, "--ca", certificate[0], DATASVC_TOKEN=TOKEN)

    def stage(name, *words, **environment):
        where = ("--cache", tmp_path / name, "--repo", pets.url, "--budget", "10MB", "--peers", node.url, "--json")
        return json.loads(run_command("stage", "pets", *where, *words, **environment).stdout)

    by_option = stage("a", "--ca", certificate[0], "--token-file", token_file)
    by_environment = stage("b", DATASVC_CA=str(certificate[0]), DATASVC_TOKEN=TOKEN)
    without = stage("c", DATASVC_TOKEN=TOKEN)
    assert by_option["num_from_peers"] == by_environment["num_from_peers"] > 0
    assert without["num_from_peers"] == 0


@pytest.mark.usefixtures("elsewhere")
def test_a_program_opens_peers_with_their_authority(run, origin, certificate, tmp_path, monkeypatch):
    repository, infos, _ = origin
    monkeypatch.setenv("DATASVC_TOKEN", TOKEN)
    secrets = {"certificate": certificate[0], "certificate_key": certificate[1], "token": TOKEN}
    node = run(repositories=(repository.url,), **secrets)
    peers = open_peers(node.url, ca_file=certificate[0])
    with Cache(tmp_path / "other", budget="10MB", peers=peers) as cache:
        assert cache.acquire(infos[0], repository).outcome == "peer"
        assert cache.counters()["peer_bytes"] == OBJECT_BYTES
    with pytest.raises(ConfigError, match="cannot read certificates"):
        open_peers(node.url, ca_file=Path("/nowhere"))
