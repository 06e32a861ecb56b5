"""The program as a user runs it: its output, errors and exit codes."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from datasvc.models import DataUse, save
from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.cli.command import run, run_apart


def datasvc(*arguments, repo=None, cache=None):
    return run(*arguments, DATASVC_REPO=repo, DATASVC_CACHE=cache)


def said(done):
    """Return the JSON that a command printed; it must have ended well."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def pets(repository, folder):
    """A repository with `pets@1`, tagged, and `cnn@1`."""
    ingest(repository, str(folder), "pets", shard_bytes=4000, message="first")
    state = {"model": {"w": torch.arange(4.0)}, "step": 7}
    use = DataUse("pets@1", "train", {"epoch": 1, "position": 3})
    save(repository, "cnn", state, step=7, data=[use], config={"lr": 0.1}, metrics={"acc": 0.5})
    return repository


@pytest.mark.slow
def test_a_data_set_from_folder_to_cache(folder, tmp_path):
    where = {"repo": tmp_path / "repo", "cache": tmp_path / "cache"}
    done = datasvc("ingest", folder, "pets", "--shard-size", "4kB", "-m", "hello", **where)
    assert done.returncode == 0
    assert "committed pets@1: 20 train, 6 val samples" in done.stdout
    assert datasvc("tag", "pets@1", "stable", **where).stdout == "pets@stable is pets@1\n"
    assert "pets\t1\t26" in datasvc("ls", **where).stdout
    assert "samples: 20" in datasvc("show", "pets@stable", **where).stdout
    assert "hello" in datasvc("log", "pets", **where).stdout
    staged = said(datasvc("stage", "pets", "--budget", "1MB", "--json", **where))
    status = said(datasvc("cache", "status", "--json", **where))
    assert staged["fetched_bytes"] == status["counters"]["origin_bytes"] > 0
    assert status["resident_bytes"] >= staged["fetched_bytes"]  # in whole blocks of the disk
    assert status["budget_bytes"] == 1_000_000
    assert status["disk_bytes"] == shutil.disk_usage(tmp_path).total > status["free_disk_bytes"] > 0
    assert said(datasvc("stage", "pets", "--json", **where))["fetched_bytes"] == 0


def test_facts_come_as_json(pets, tmp_path):
    assert said(datasvc("ls", "--json", repo=pets.url))[0]["samples"] == 26
    shown = said(datasvc("show", "pets", "--json", repo=pets.url))
    assert shown["splits"]["train"]["classes"] == ["a", "b", "c"]
    assert [entry["version"] for entry in said(datasvc("log", "pets", "--json", repo=pets.url))] == [1]
    assert said(datasvc("tag", "pets", "x", "--json", repo=pets.url)) == {"tag": "x", "version": "pets@1"}
    (model,) = said(datasvc("models", "ls", "--json", repo=pets.url))
    assert model == said(datasvc("models", "show", "cnn", "--json", repo=pets.url))
    assert model == said(datasvc("models", "log", "cnn", "--json", repo=pets.url))[0]
    assert (model["step"], model["config"], model["metrics"]) == (7, {"lr": 0.1}, {"acc": 0.5})
    restored = said(datasvc("models", "restore", "cnn", tmp_path / "out", "--json", repo=pets.url))
    assert all(Path(file).is_file() for file in restored["files"])


def test_a_model_version_shows_what_it_came_from(pets):
    shown = datasvc("models", "show", "cnn@1", repo=pets.url).stdout
    for line in ("data pets@1/train:", "position: 3", "code: ", "lr: 0.1", "acc: 0.5", "step: 7"):
        assert line in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "cats"], 1, "no data set 'cats'"),
        (["show", "pets@7"], 1, "pets has no version 7; it has 1"),
        (["show", "pets@beta"], 1, "pets has no tag 'beta'; it has: none yet"),
        (["show", "Pets"], 2, "is not a valid name of a data set"),
        (["log", "pets@1"], 2, "give the name alone: pets"),
        (["models", "log", "cnn@1"], 2, "give the name alone: cnn"),
        (["models", "show", "rnn"], 1, "no model 'rnn'"),
        (["tag", "pets", "7"], 2, "NAME@NUMBER is a version"),
        (["ingest", "/nonexistent/source", "pets"], 1, "there is no file or folder of this name"),
        (["ingest", ".", "Pets"], 2, "is not a valid name of a data set"),
        (["ingest", ".", "pets", "--shard-size", "many"], 2, "is not a valid size"),
        (["ingest", ".", "pets", "--on-bad", "ignore"], 2, "--on-bad"),
        (["stage", "pets", "--budget", "-1"], 2, "is not a valid size"),
        (["stage", "pets", "--budget", "10"], 1, "staging needs"),
        (["stage", "pets"], 2, "has no budget yet"),
        (["stage", "pets", "--budget", "1MB", "--split", "test"], 1, "has no split 'test'; it has: train, val"),
        (["cache", "status"], 1, "is not a cache"),
        (["nonsense"], 2, "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_say_what_to_do_without_a_traceback_and_with_their_exit_code(pets, tmp_path, arguments, code, message):
    done = datasvc(*arguments, repo=pets.url, cache=tmp_path / "cache")
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["ls"], ["show", "pets@9"], ["show"], ["--help"]], ids=" ".join)
def test_a_process_of_its_own_prints_and_ends_as_these_tests_see_it(pets, arguments):
    apart, here = run_apart(*arguments, DATASVC_REPO=pets.url), run(*arguments, DATASVC_REPO=pets.url)
    assert (apart.returncode, apart.stdout, apart.stderr) == (here.returncode, here.stdout, here.stderr)


def test_a_source_that_is_not_there_leaves_no_repository_behind(tmp_path):
    datasvc("ingest", tmp_path / "missing", "pets", repo=tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


def test_without_a_repository_the_error_says_how_to_name_or_make_one(tmp_path):
    done = datasvc("ls")
    assert done.returncode == 2
    assert "--repo" in done.stderr
    done = datasvc("ls", repo=tmp_path / "missing")
    assert (done.returncode, "datasvc ingest" in done.stderr) == (1, True)


def test_corrupt_data_ends_with_3_and_names_the_tensor(pets, tmp_path):
    for path in Path(pets.url, "objects").rglob("*"):
        if path.is_file() and path.read_bytes() == torch.arange(4.0).numpy().tobytes():
            path.write_bytes(b"\1" + path.read_bytes()[1:])
    done = datasvc("models", "restore", "cnn", tmp_path / "out", repo=pets.url)
    assert done.returncode == 3
    assert "tensor 'model.w' is corrupt" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_repository_of_a_later_format_is_refused(pets):
    Path(pets.url, "datasvc.json").write_text('{"format": 2}')
    done = datasvc("ls", repo=pets.url)
    assert (done.returncode, "upgrade datasvc" in done.stderr) == (2, True)


@pytest.mark.slow
def test_a_store_that_does_not_answer_ends_with_5(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    done = run_apart("ls", DATASVC_REPO="s3://bucket/repo")  # here, clients of the real server are kept
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert "secret-of-the-test" not in done.stderr


def test_the_python_way_is_as_short_as_the_readme_says(pets, tmp_path):
    import datasvc as package
    from datasvc import loaders
    from datasvc.cache import Cache

    repo = package.open(pets.url)
    train = repo.dataset("pets@1")["train"]
    assert train[5]["key"]
    cache = Cache(tmp_path / "cache", budget="1MB")
    with loaders.ImageLoader(train, batch_size=4, training=True, cache=cache, size=32) as loader:
        for images, labels in loader:
            assert len(images) == len(labels) == 4
        assert loader.state_dict()["epoch"] == 1
    assert (repo.datasets.names(), repo.models.names()) == (["pets"], ["cnn"])
    assert repo.models.restore("cnn").state["step"] == repo.models.describe("cnn").entry["step"] == 7


def test_opening_from_python_makes_a_repository_only_when_asked(tmp_path):
    import datasvc as package
    from datasvc.errors import NotFoundError

    with pytest.raises(NotFoundError):
        package.open(str(tmp_path / "repo"))
    package.open(str(tmp_path / "repo"), create=True)
    assert Repository.open(str(tmp_path / "repo")).names("datasets") == []
