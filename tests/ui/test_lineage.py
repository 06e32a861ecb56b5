"""The lineage of a version, and of a sample."""

from urllib.parse import quote

import pytest

import datasvc
from datasvc.models import Execution
from datasvc.testing import small_dataset
from datasvc.views.provenance import tournament_flow
from tests.ui.conftest import check_accessible, check_width, running_ui, save_model, texts
from tests.ui.test_model import HOSTILE, printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A repository with a run of six versions, the last of which another model continues; and one removed version."""
    url = tmp_path_factory.mktemp("lineage") / "repo"
    repo = datasvc.open(str(url), create=True)
    small_dataset(repo, "pets", samples=32)
    for step in range(1, 7):
        save_model(repo, "cnn", step, "pets@1", **({"parent": f"cnn@{step - 1}"} if step > 1 else {}))
    save_model(repo, "tuned", 7, "pets@1", parent="cnn@6")
    repo.models.remove(["cnn@6"])
    return url


def keys_of(url, ref):
    """Return the keys of the split for training."""
    return [sample.key for sample in datasvc.open(str(url)).datasets.head(ref, 100, split="train")]


def test_the_lineage_of_a_version_is_what_the_command_line_prints(ui, filled):
    assert ui.json("/lineage/cnn@4", "lineage") == printed("models", "lineage", "cnn@4", repo=filled)


def test_the_graph_leads_from_the_source_to_the_version(ui):
    html = ui.get("/lineage/cnn@4")[2]
    for name in ("pets@1", "pets@2", "cnn@2", "cnn@4", "image-folder"):
        assert name in texts(html)
    assert 'href="/datasets/pets@2"' in html
    assert 'href="/models/cnn@2"' in html
    assert "with 5 shards from 1 source." in texts(html)


def test_a_run_is_one_node_and_a_removed_version_is_marked(trained):
    with running_ui(trained) as server:
        html = server.get("/lineage/tuned@1")[2]
        assert ">6 versions<" in html
        assert "cnn@6 to cnn@1" in html
        assert "model, removed" in server.get("/lineage/cnn@6")[2]


def test_a_tournament_is_drawn_round_by_round(tmp_path):
    rounds = [
        {"step": 8, "round": 0, "pairs": [[1, 0]], "losses": [2.5, 1.25, None]},
        {"step": 16, "round": 1, "pairs": [[1, 2]], "losses": [1.0, 0.875, None]},
    ]
    tournament = {"rounds": rounds, "winner": 2, "losses": [0.5, 0.75, 0.25]}
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.models.save("net", {"w": [1.0]}, step=20, execution=Execution(tournament=tournament))
    repo.models.save("net", {"w": [1.0]}, step=21, execution=Execution(tournament={"rounds": "none"}))
    with running_ui(tmp_path / "repo") as server:
        html = server.get("/lineage/net@1")[2]
        assert "Rounds of its tournament" in html
        for text in ("loss 1.25, step 8", "not finite, step 16", "loss 0.25, the model", "rank 2"):
            assert text in html, text
        status, _, html = server.get("/lineage/net@2")
        assert (status, "Rounds of its tournament" in html) == (200, False)
    nodes, edges = tournament_flow(tournament)
    assert [(edge.source, edge.target) for edge in edges] == [
        ("0:1", "1:0"), ("0:1", "1:1"), ("0:2", "1:2"), ("1:0", "2:0"), ("1:1", "2:1"), ("1:1", "2:2"),
    ]  # fmt: skip
    assert len(nodes) == 9


def test_the_lineage_of_a_sample_is_what_trained_on_prints(trained):
    key = keys_of(trained, "pets@1")[0]
    with running_ui(trained) as server:
        address = f"/lineage/pets@1?key={quote(key)}"
        expected = printed("models", "trained-on", "--sample", key, "--data", "pets", repo=trained)
        assert server.json(address, "consumers") == expected
        only = printed("models", "trained-on", "cnn@2", "--sample", key, "--data", "pets", repo=trained)
        assert server.json(f"{address}&model=cnn@2", "consumers") == only
        text = texts(server.get(address)[2])
        for use in expected["consumed"]:
            assert f"epoch {use['epoch']}, position {use['position']}" in text


def test_a_sample_that_no_version_read_and_one_that_does_not_exist(trained):
    with running_ui(trained) as server:
        read = {
            key
            for key in keys_of(trained, "pets@1")
            if server.json(f"/lineage/pets?key={quote(key)}", "consumers")["consumed"]
        }
        unread = sorted(set(keys_of(trained, "pets@1")) - read)
        assert len(read) == 16  # two batches of 8
        assert "No version was trained on" in texts(server.get(f"/lineage/pets?key={quote(unread[0])}")[2])
        assert "is in no data of pets" in texts(server.get("/lineage/pets?key=nothing")[2])


def test_a_data_set_without_a_key_asks_for_one(ui):
    status, _, html = ui.get("/lineage/pets@2")
    assert status == 200
    assert "Give the key of a sample" in html
    assert ui.get("/lineage/nothing@1")[0] == 404


@pytest.mark.parametrize("key", HOSTILE)
def test_a_hostile_key_is_text(ui, key):
    html = ui.get(f"/lineage/pets?key={quote(key, safe='')}")[2]
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert "<svg onload" not in html


def test_a_person_zooms_follows_a_node_and_asks_for_a_sample(ui, filled, page):
    page.goto(f"{ui.url}/lineage/cnn@4")
    check_accessible(page)
    drawing = page.locator("[data-zoom=wide] svg")
    whole = drawing.get_attribute("viewBox")
    page.get_by_role("button", name="Zoom in").click()
    near = drawing.get_attribute("viewBox")
    assert near != whole
    box = drawing.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 30)
    page.mouse.up()
    assert drawing.get_attribute("viewBox") != near
    page.get_by_role("button", name="Whole picture").click()
    assert drawing.get_attribute("viewBox") == whole
    page.locator("[data-zoom=wide] a[href='/models/cnn@2']").click()
    page.wait_for_url("**/models/cnn@2")
    first_read = next(
        key
        for key in keys_of(filled, "pets@2")
        if ui.json(f"/lineage/pets?key={quote(key)}", "consumers")["consumed"]
    )
    page.goto(f"{ui.url}/lineage/pets")
    page.get_by_label("key", exact=True).fill(first_read)
    page.get_by_role("button", name="Show").click()
    page.get_by_role("table", name="Uses of the sample in training").wait_for()
    check_accessible(page)
    check_width(page)
