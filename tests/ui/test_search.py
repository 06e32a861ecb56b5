"""What the search box finds."""

from pathlib import Path
from urllib.parse import quote

import pytest

import datasvc
from datasvc.repository import Repository
from datasvc.runs import RunLog
from datasvc.shards import open_dataset
from datasvc.ui.pages import search
from tests.shards.written_versions import TEXT_SCHEMA, write_version
from tests.ui.conftest import check_accessible, check_width, running_ui, texts
from tests.ui.test_faults import damage
from tests.ui.test_model import HOSTILE


def found(server, text):
    return [(each["kind"], each["name"]) for each in server.json(f"/search?q={quote(text, safe='')}", "results")]


def test_a_key_finds_its_sample_in_the_newest_version_of_each_data_set(ui, filled):
    repo = datasvc.open(str(filled))
    key = next(iter(repo.datasets.head("pets@2", 1, split="val"))).key
    assert ("sample", f"{key} of pets@2/val") in found(ui, key)
    (match,) = [each for each in ui.json(f"/search?q={quote(key)}", "results") if "pets@2/val" in each["name"]]
    assert key in ui.get(match["link"])[2]
    # A deleted sample is in an older version only.
    (deleted,) = {each.key for each in repo.datasets.head("pets@1", 1, split="train")}
    assert ("sample", f"{deleted} of pets@2/train") not in found(ui, deleted)


def test_the_beginning_of_a_digest_or_of_a_commit_finds_the_versions_that_name_it(ui, filled):
    repo = datasvc.open(str(filled))
    version = repo.models.describe("cnn@3")
    assert ("digest (tensors)", f"{version.tensors} of cnn@3") in found(ui, version.tensors[:8])
    table = repo.dataset("pets@1")["val"].digest
    kinds = found(ui, table[:12])
    assert ("digest (shard table)", f"{table} of pets@1") in kinds
    assert ("digest (shard table)", f"{table} of pets@2") in kinds
    revision = version.entry["code"].get("revision")
    if revision:
        assert ("code revision", f"{revision} of cnn@1") in found(ui, revision[:7])


@pytest.mark.slow
def test_the_beginning_of_the_digest_of_a_shard_finds_the_versions_that_have_it(ui, filled, monkeypatch):
    repo = datasvc.open(str(filled))
    table = repo.dataset("pets@1")["train"].table
    shard = table.shard(2).digest
    assert shard in {info.digest for info in repo.dataset("pets@2")["train"].table.shards()}
    results = ui.json(f"/search?q={shard[:9].upper()}", "results")
    assert [(each["kind"], each["name"]) for each in results] == [
        ("digest (shard)", f"{shard} of pets@2/train, shard 2"),
        ("digest (shard)", f"{shard} of pets@1/train, shard 2"),
    ]
    first = ui.json(results[1]["link"], "samples")["samples"][0]["number"]
    assert first == table.samples_per_shard[:2].sum()
    assert ("digest (sample index)", f"{table.index(0)} of pets@1/train, shard 0") in found(ui, table.index(0)[:6])
    deletions = repo.dataset("pets@2")["train"].table.deletions
    assert found(ui, deletions) == [("digest (deletions)", f"{deletions} of pets@2/train")]
    monkeypatch.setattr(search, "_MAX_PLACES", 1)
    assert len(found(ui, shard)) == 1
    assert ui.json(f"/search?q={shard}", "notes") == [f"{shard} is at 2 places, of which 1 are shown."]
    monkeypatch.setattr(search, "_MAX_DIGESTS", 0)
    html = ui.get(f"/search?q={shard}")[2]
    assert f"{shard} is the beginning of 1 digest, of which the first 0 are shown: type more digits." in texts(html)
    monkeypatch.setattr(search, "_MAX_ROWS", 1)
    left_out = ui.json(f"/search?q={shard}", "not_searched")
    assert {"kind": "split", "name": "shards of pets@1/train", "link": "/datasets/pets@1"} in left_out


@pytest.mark.slow
def test_the_beginning_of_the_digest_of_a_sample_finds_it_in_the_newest_versions(ui, filled, monkeypatch):
    place = ui.json("/datasets/pets@2/samples/train/3", "sample")
    digest, key = place["place"]["sample_digest"], place["key"]
    results = ui.json(f"/search?q={digest[:10]}", "results")
    assert ("digest (sample)", f"{digest} of {key} of pets@2/train") in found(ui, digest[:10])
    assert any(each["link"] == "/datasets/pets@2/samples/train/3" for each in results)
    payload = place["place"]["payload_digest"]
    assert ("digest (content of a sample)", f"{payload} of {key} of pets@2/train") in found(ui, payload)
    assert not [name for kind, name in found(ui, digest) if kind == "digest (shard)"]
    # A deleted sample is in an older version only.
    keys = {each.key for each in datasvc.open(str(filled)).datasets.head("pets@2", 94, split="train")}
    rows = ui.json("/datasets/pets@1/samples/train", "samples")["samples"]
    number = next(row["number"] for row in rows if row["key"] not in keys)
    deleted = ui.json(f"/datasets/pets@1/samples/train/{number}", "sample")["place"]["sample_digest"]
    assert not [name for _, name in found(ui, deleted) if name.endswith("pets@2/train")]
    monkeypatch.setattr(search, "_MAX_SAMPLES", 1)
    left_out = [each["name"] for each in ui.json(f"/search?q={digest}", "not_searched")]
    assert "digests of the samples of pets@2/train, which has 5 shards" in left_out


def left_out_of(server, text):
    return [each["name"] for each in server.json(f"/search?q={text}", "not_searched")]


def test_data_sets_after_the_last_one_searched_are_listed(ui, monkeypatch):
    assert left_out_of(ui, "abcdef") == []
    monkeypatch.setattr(search, "_MAX_DATASETS", 1)
    assert left_out_of(ui, "abcdef") == ["digests of the samples of 1 more", "keys of 1 more"]


def test_splits_without_sample_indexes_do_not_count_as_searched(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    shards = [[{"key": "a", "text": "x"}], [{"key": "b", "text": "y"}]]
    write_version(repository, "old", {"train": shards}, TEXT_SCHEMA, indexed=False)
    with running_ui(tmp_path / "repo") as server:
        assert left_out_of(server, "abcdef") == [
            "digests of the samples of old@1/train: 2 of 2 shards without a sample index"
        ]
        searched = server.json("/search?q=abcdef", "searched")
        assert "digests of samples in 0 splits of the newest versions" in searched


@pytest.mark.parametrize("fault", [damage, Path.unlink])
def test_a_damaged_shard_table_hides_no_other_matches(tmp_path, fault):
    repository = Repository.create(str(tmp_path / "repo"))
    for name in ("bad", "good"):
        write_version(repository, name, {"train": [[{"key": "a", "text": name}]]}, TEXT_SCHEMA)
    fault(Path(repository.objects.location(open_dataset(repository, "bad")["train"].digest)))
    with running_ui(tmp_path / "repo") as server:
        assert found(server, "a") == [("data set", "bad"), ("sample", "a of good@1/train")]
        digest = server.json("/datasets/good/samples/train/0", "sample")["place"]["sample_digest"]
        assert ("digest (sample)", f"{digest} of a of good@1/train") in found(server, digest)
        left_out = left_out_of(server, digest)
        assert [name for name in left_out if name.startswith("digests of bad@1/train: ")]
        assert [name for name in left_out if name.startswith("keys of bad@1/train: ")]


def test_a_prefix_that_is_too_short_for_a_digest_is_told(ui):
    (note,) = ui.json("/search?q=abcde", "notes")
    assert note == "Digests were not searched: 5 hexadecimal digits are too few, type 6 or more."
    assert ui.json("/search?q=abcdef", "notes") == ui.json("/search?q=abcdeg", "notes") == []


def test_a_part_of_an_identifier_finds_a_run(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    with RunLog.open(repo.repository, "digits-cnn") as log:
        log.report("step", step=1, loss=1.0)
    with running_ui(tmp_path / "repo") as server:
        assert found(server, log.id[-6:]) == [("run", f"digits-cnn/{log.id}")]
        assert found(server, "digits") == [("run", f"digits-cnn/{log.id}")]


def test_what_was_not_searched_is_told_with_a_link_that_does(filled, monkeypatch):
    monkeypatch.setattr(search, "_MAX_SHARDS", 3)
    with running_ui(filled) as server:
        html = server.get("/search?q=nothing")[2]
        assert "pets@2/train, which has 5 shards" in texts(html)
        assert 'href="/datasets/pets@2/samples/train?key=nothing"' in html
        assert server.json("/search?q=nothing", "searched")[-1].startswith("keys of samples, compared exactly, in 2")


def test_a_search_for_digests_says_how_many_names_it_covers(filled, monkeypatch):
    with running_ui(filled) as server:
        assert "of each data set and model" in server.json("/search?q=abcdef", "searched")[2]
        monkeypatch.setattr(search, "_MAX_ENTRIES", 2)
        line = server.json("/search?q=abcdef", "searched")[2]
        assert line.startswith("digests in the newest 1 version of the first 2 of 3 data sets and models")


@pytest.mark.parametrize("text", [*HOSTILE, "' or 1=1 --", "%", "\x00", "a" * 5000])
def test_a_hostile_text_is_text_and_finds_nothing(ui, text):
    address = f"/search?q={quote(text, safe='')}"
    assert ui.json(address, "results") == []
    html = ui.get(address)[2]
    assert "<script>alert" not in html
    assert "<svg onload" not in html


def test_the_results_are_accessible_and_narrow(ui, filled, page):
    page.goto(f"{ui.url}/search?q=class")
    check_accessible(page)
    check_width(page)
