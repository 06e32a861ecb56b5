"""What the search box finds."""

from urllib.parse import quote

import pytest

import datasvc
from datasvc.runs import RunLog
from datasvc.ui.pages import search
from tests.ui.conftest import check_accessible, check_width, running_ui, texts
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
        (line,) = [line for line in server.json("/search?q=abcdef", "searched") if line.startswith("digests")]
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
