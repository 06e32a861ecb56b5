"""models verify, sign and restore by way of a cache, as a user runs them."""

import json

import pytest
from typer.testing import CliRunner

from datasvc.cli.main import make_app
from datasvc.errors import CorruptDataError
from datasvc.models import describe_model
from tests.models.every_kind import copy_of, flip, links_of, save_every_kind


def run(*words):
    return CliRunner().invoke(make_app(), list(map(str, words)))


def said(done):
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


@pytest.fixture
def models(repository):
    save_every_kind(repository)
    return repository


@pytest.mark.slow
def test_verify_ends_with_3_and_names_the_tensor_until_it_is_repaired(models, tmp_path):
    copy = copy_of(models, tmp_path / "copy")
    done = run("models", "verify", "--all", "--repo", models.url)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "no problems")
    (link,) = [link for link in links_of(models, "m@2") if link.encoding == "raw" and link.length == 90_000]
    flip(models.objects.local_path(link.object), 7)
    done = run("models", "verify", "m@2", "--repo", models.url)
    assert done.exit_code == 3
    assert "tensors is changed" in done.stdout
    assert "m@2 'model.noise'" in done.stdout
    facts = said(run("models", "verify", "m", "--repair-from", copy.url, "--json", "--repo", models.url))
    assert facts["num_left"] == 0
    assert facts["repairs"][0]["digest"] == link.object
    assert run("models", "verify", "m@2", "--deep", "--repo", models.url).exit_code == 0


def test_what_a_bad_table_hid_is_found_once_it_is_repaired_and_is_left_where_no_copy_is_good(models, tmp_path):
    copy = copy_of(models, tmp_path / "copy")
    (link,) = [link for link in links_of(models, "m@2") if link.encoding == "raw" and link.length == 90_000]
    for repository in (models, copy):
        flip(repository.objects.local_path(link.object), 7)
    table = models.objects.local_path(describe_model(models, "m@2").tensors)
    flip(table, 50)
    flip(models.objects.local_path(describe_model(models, "m@2").entry["state"]), 20)
    done = run("models", "verify", "m@2", "--repair-from", copy.url, "--json", "--repo", models.url)
    assert done.exit_code == 3
    facts = json.loads(done.stdout)
    assert {each["role"] for each in facts["problems"]} == {"tensor table", "state", "tensors"}
    assert facts["num_left"] == 1
    assert {each["digest"]: each["failure"] is None for each in facts["repairs"]}[link.object] is False
    done = run(
        "models", "verify", "m@2", "--repair-from", copy_of(models, tmp_path / "again").url, "--repo", models.url
    )
    assert done.stdout.splitlines()[-1] == "1 problem"


def test_a_signed_version_is_restored_by_way_of_the_cache_and_an_unsigned_one_refused(models, tmp_path, monkeypatch):
    key = said(run("models", "keygen", tmp_path / "key", "--json"))
    signed = said(run("models", "sign", "m@2", "--key", tmp_path / "key", "--json", "--repo", models.url))
    assert signed["key_id"] == key["key"]
    monkeypatch.setenv("DATASVC_TRUSTED_KEYS", key["public"])
    cache = ["--cache", tmp_path / "cache", "--budget", "50MB", "--repo", models.url]
    facts = said(run("models", "restore", "m@2", tmp_path / "out", *cache, "--json"))
    assert facts["came_bytes"].keys() == {"origin"}
    assert facts["seconds"] > 0
    assert facts["bytes_s"] == pytest.approx(facts["size_bytes"] / facts["seconds"])
    done = run("models", "restore", "m@2", tmp_path / "again", *cache)
    assert "stored bytes: resident" in done.stdout
    done = run("models", "restore", "m@1", tmp_path / "refused", *cache)
    assert isinstance(done.exception, CorruptDataError)
    assert not (tmp_path / "refused").exists()
    done = run("models", "verify", "m@1", "--repo", models.url)
    assert done.exit_code == 3
    assert "not trusted" in done.stdout
