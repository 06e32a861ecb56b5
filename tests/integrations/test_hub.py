"""Models and data sets pushed to a stand-in of the Hub by its real client, and pulled again."""

import json
from types import SimpleNamespace

import fsspec
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.testing import small_dataset
from tests.shards.hub_server import TOKEN, HubServer

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path, monkeypatch):
    # Xet is another protocol, which the stand-in does not have.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    server = HubServer(tmp_path / "hub", private=("models/lab/secret",)).start()
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.url, "token": False})
    yield server
    server.close()
    huggingface_hub.HfFileSystem.clear_instance_cache()


@pytest.fixture
def api(hub):
    return huggingface_hub.HfApi(endpoint=hub.url, token=False)


@pytest.fixture
def repo(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


def weights(seed, size=300):
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{number}.weight": torch.rand(size, size, generator=generator) for number in range(3)}


def save(repo, seed):
    return str(repo.models.save("net", {"model": weights(seed), "step": 3}, step=seed))


@pytest.mark.parametrize(
    ("status", "kind"), [(400, ConfigError), (403, ConfigError), (408, UnavailableError), (429, UnavailableError)]
)
def test_a_request_that_may_be_repeated_is_no_error_of_the_user(status, kind):
    from datasvc.integrations.hub import _hub_errors

    response = SimpleNamespace(status_code=status, headers={}, request=None)
    with pytest.raises(kind, match="lab/net"), _hub_errors("lab/net"):
        raise huggingface_hub.errors.HfHubHTTPError("the Hub has refused this", response=response)


def test_a_model_goes_to_the_hub_and_back_bit_by_bit(hub, api, repo, tmp_path):
    from datasvc.integrations.hub import pull_model, push_model

    pushed = push_model(repo, save(repo, 1), "lab/net", api=api, max_shard_bytes=400_000, tag="v1")
    root = hub.folder / "models/lab/net"
    assert pushed == f"lab/net@{hub.commit_of('models/lab/net')}"
    assert hub.commits["models/lab/net"] == ["datasvc: net@1"]
    assert json.loads((root / "datasvc.json").read_text())["datasvc.version"] == "net@1"
    other = datasvc.open(str(tmp_path / "other"), create=True)
    pulled = pull_model(other, "lab/net", revision="v1", api=api)
    assert pulled == "net@1"
    for name, tensor in weights(1).items():
        assert torch.equal(other.models.restore(pulled).state["model"][name], tensor)
    entry = other.models.restore(pulled).entry
    assert (entry["message"], entry["imported"]["format"]) == (f"hf://{pushed}", "huggingface")
    assert pull_model(other, "lab/net", api=api) == "net@1"  # this commit is there already


def test_a_second_push_replaces_the_files_of_the_first_and_keeps_others(hub, api, repo):
    from datasvc.integrations.hub import pull_model, push_model

    push_model(repo, save(repo, 1), "lab/net", api=api, max_shard_bytes=400_000)
    root = hub.folder / "models/lab/net"
    assert (root / "model-00003-of-00003.safetensors").exists()
    (root / "README.md").write_text("card")
    (root / "pytorch_model.bin").write_bytes(b"of another program")
    second = push_model(repo, save(repo, 2), "lab/net", api=api)
    assert {path.name for path in root.iterdir()} >= {"README.md", "model.safetensors", "datasvc.json"}
    assert list(root.glob("model-*")) == list(root.glob("*.bin")) == []
    num_commits = len(hub.commits["models/lab/net"])
    assert push_model(repo, "net@2", "lab/net", api=api) == second  # nothing changes
    assert len(hub.commits["models/lab/net"]) == num_commits
    assert pull_model(repo, "lab/net", "again", api=api) == "again@1"


def test_an_interrupted_push_leaves_the_hub_as_it_was_and_is_continued(hub, api, repo):
    from datasvc.integrations.hub import push_model

    save(repo, 1)
    hub.failing = 1
    with pytest.raises(UnavailableError, match="does not answer for lab/net"):
        push_model(repo, "net@1", "lab/net", api=api, max_shard_bytes=400_000)
    assert "models/lab/net" not in hub.commits
    sent = [path for method, path in hub.requests if method == "PUT"]
    push_model(repo, "net@1", "lab/net", api=api, max_shard_bytes=400_000)
    assert hub.commits["models/lab/net"] == ["datasvc: net@1"]
    again = [path for method, path in hub.requests if method == "PUT"][len(sent) :]
    assert len(again) < 3  # what arrived is not sent again


def test_a_data_set_is_pushed_as_parquet_and_pulled_by_an_ingest(hub, api, tmp_path):
    from datasvc.integrations.hub import push_dataset

    small_dataset(str(tmp_path / "data"), "pets", samples=24, shard_bytes=6000)
    repo = datasvc.open(str(tmp_path / "data"))
    pushed = push_dataset(repo, "pets", "lab/pets", api=api)
    (copy,) = repo.datasets.copies("pets")
    assert (copy.version, copy.destination) == ("pets@1", f"hf://datasets/{pushed}")
    files = sorted(path.name for path in (hub.folder / "lab/pets/data").iterdir())
    assert len(files) > 1
    assert all(name.endswith(".parquet") for name in files)
    repo.datasets.ingest("hf://datasets/lab/pets", "back")
    there, here = (repo.dataset(name)["train"] for name in ("back@1", "pets@1"))
    content = [{sample["key"]: (sample["image"], sample["label"]) for sample in split} for split in (there, here)]
    assert sorted(content[0].values()) == sorted(content[1].values())


def test_what_the_hub_refuses_is_an_error_that_says_what_to_do(hub, api, repo):
    from datasvc.integrations.hub import pull_model, push_model

    with pytest.raises(NotFoundError, match="the Hub has no lab/none"):
        pull_model(repo, "lab/none", api=api)
    (hub.folder / "models/lab/secret").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="or not for this token"):
        pull_model(repo, "lab/secret", api=api)
    with pytest.raises(NotFoundError, match="no model"):
        push_model(repo, "net@7", "lab/net", api=api)
    (hub.folder / "models/lab/empty").mkdir()
    with pytest.raises(ConfigError):
        pull_model(repo, "lab/empty", api=api)
    with pytest.raises(ConfigError, match="no name of a repository"):
        push_model(repo, save(repo, 1), "a/b/c", api=api)
    gone = huggingface_hub.HfApi(endpoint="http://127.0.0.1:9", token=False)
    with pytest.raises(UnavailableError, match="does not answer for lab/net"):
        pull_model(repo, "lab/net", api=gone)
    secret = huggingface_hub.HfApi(endpoint=hub.url, token=TOKEN)
    push_model(repo, "net", "lab/secret", api=secret)
    assert hub.commits["models/lab/secret"] == ["datasvc: net@1"]
