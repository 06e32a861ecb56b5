"""The list of models, and the page of a model version."""

import json

import pytest
import torch

import datasvc
from datasvc.models.versions.signing import load_private_key, make_key
from datasvc.ui.pages import model as model_page
from tests.cli.command import run
from tests.ui.conftest import check_accessible, check_width, running_ui, texts

HOSTILE = [
    '<script>alert("x")</script>',
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
    "javascript:alert(1)",
    "x'); drop table versions; --",
    "\u202eesrever\x1b[31m",
    "]]></title><svg onload=alert(1)>",
]


def printed(*words, repo):
    """Return the JSON that a command prints."""
    result = run(*words, "--json", "--repo", str(repo))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A repository with a model that has a signed version, a removed one, and hostile texts."""
    url = tmp_path_factory.mktemp("model") / "repo"
    repo = datasvc.open(str(url), create=True)
    for step in range(1, 5):
        repo.models.save(
            "net",
            {"w": [step]},
            step=step,
            metrics={"loss": 1 / step, **dict.fromkeys(HOSTILE, 1.0)},
            config={text: text for text in HOSTILE},
            message=HOSTILE[step % len(HOSTILE)],
        )
    repo.models.remove(["net@2"], message="<b>too old</b>")
    make_key(url.parent / "key")
    repo.models.sign("net@4", load_private_key(url.parent / "key"))
    return url


def test_the_list_and_each_panel_are_what_the_command_line_prints(ui, filled):
    assert ui.json("/models", "models") == printed("models", "ls", repo=filled)
    page = "/models/cnn@3"
    assert ui.json(page, "version") == printed("models", "show", "cnn@3", repo=filled)
    assert ui.json(page, "versions") == printed("models", "log", "cnn", "--last", "20", repo=filled)
    query = (
        "select version, step, metrics['loss'] as value from all_versions where model = 'cnn' order by version desc"
    )
    assert ui.json(f"{page}?metric=loss", "metric") == printed("models", "sql", query, repo=filled)
    assert query in ui.get(f"{page}?metric=loss")[2].replace("&#39;", "'").replace("'\"'\"'", "'")


def test_a_name_or_a_tag_shows_the_version_that_it_refers_to(ui):
    assert ui.json("/models/cnn", "version")["version"] == 4
    assert ui.json("/models/cnn@prod", "version")["version"] == 3
    assert ui.get("/models/cnn@9")[0] == 404


def test_the_dry_run_of_retention_is_that_of_the_command_and_changes_nothing(ui, filled):
    address = "/models/cnn?last=1&best=1&keep_metric=loss"
    expected = printed("models", "retain", "cnn", "--last", "1", "--best", "1", "--metric", "loss", repo=filled)
    assert ui.json(address, "retention") == expected
    assert expected["removed"] == [1, 2]
    assert "It would remove 2 versions" in texts(ui.get(address)[2])
    assert [entry["version"] for entry in ui.json("/models/cnn", "versions")] == [4, 3, 2, 1]


def test_a_policy_that_is_not_valid_is_explained_on_the_page(ui):
    status, _, html = ui.get("/models/cnn?best=1")
    assert status == 200
    assert "keeps the best versions, but names no metric" in html


def test_pages_of_versions_and_the_span_of_the_chart_are_in_the_address(filled, monkeypatch):
    monkeypatch.setattr(model_page, "VERSIONS_ON_A_PAGE", 3)
    monkeypatch.setattr(model_page, "NEWEST_IN_CHART", 2)
    with running_ui(filled) as server:
        assert [entry["version"] for entry in server.json("/models/cnn", "versions")] == [4, 3, 2]
        # The page that has the version is the default.
        assert [entry["version"] for entry in server.json("/models/cnn@1", "versions")] == [1]
        condition = "model = 'cnn' and version between 1 and 1"
        assert server.json("/models/cnn?page=1", "versions") == printed(
            "models", "find", condition, "--removed", repo=filled
        )
        assert [row["version"] for row in server.json("/models/cnn", "metric")] == [4, 3]
        query = (
            "select version, step, metrics['loss'] as value from all_versions where model = 'cnn' order by version"
        )
        rows = printed("models", "sql", query, repo=filled)
        assert server.json("/models/cnn?span=all", "metric") == rows[::-1]
        assert server.get("/models/cnn?page=2")[0] == 400


def test_a_removed_version_is_hollow_and_keeps_its_metadata(kept):
    with running_ui(kept) as server:
        html = server.get("/models/net@2")[2]
        assert "It was removed" in html
        assert "net@2 (removed)" in html
        assert server.json("/models/net@2", "version") == printed("models", "show", "net@2", repo=kept)
        assert server.json("/models/net@2", "stored") is None


def test_the_stored_size_counts_chunks_by_the_length_of_their_chain(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    state = {"w": torch.randn(100_000, generator=torch.Generator().manual_seed(0))}
    repo.models.save("net", state, step=1)
    state["w"][::1000] += 1
    repo.models.save("net", state, step=2, parent="net@1")
    with running_ui(tmp_path / "repo") as server:
        first, second = (server.json(f"/models/net@{number}", "stored") for number in (1, 2))
    assert first["tensor_bytes"] == second["tensor_bytes"] == 400_000
    assert first["chain_lengths"] == {"1": first["num_chunks"]}
    # The second version is stored as a difference to the first, whose bytes a restore reads too.
    assert set(second["chain_lengths"]) == {"2"}
    assert second["stored_bytes"] > first["stored_bytes"]


def test_signatures_are_listed(kept):
    with running_ui(kept) as server:
        (signer,) = server.json("/models/net@4", "signatures")
        assert signer in server.get("/models/net@4")[2]
        assert server.json("/models/net@3", "signatures") == []


def test_a_version_without_a_run_says_why(kept):
    with running_ui(kept) as server:
        html = server.get("/models/net@4")[2]
    assert "<dt>run</dt><dd>not recorded: the save had no run=</dd>" in html


def test_the_parts_of_a_note_are_divided_in_the_graph_of_versions(kept, ui):
    with running_ui(kept) as server:
        html = server.get("/models/net@4")[2]
    assert "(this version) · step 4 · " in html
    assert "118 samples · delete · blurred" in ui.get("/datasets/pets@2")[2]


def test_the_run_of_a_version_is_a_link_on_its_page_and_in_its_lineage(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    for run_ref in ("net/20261123-221830-3fa9c1", "<b>any text</b>"):
        repo.models.save("net", {"w": [1.0]}, step=1, run=run_ref)
    with running_ui(tmp_path / "repo") as server:
        for page in ("models", "lineage"):
            assert 'href="/runs/net/20261123-221830-3fa9c1"' in server.get(f"/{page}/net@1")[2]
            html = server.get(f"/{page}/net@2")[2]
            assert "&lt;b&gt;any text" in html
            assert 'href="/runs/%3Cb' not in html


def test_a_version_that_is_not_finite_names_the_version_to_continue_from_if_there_is_one(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    for name, values in (("net", (1.0, torch.nan, torch.inf)), ("lost", (torch.nan, torch.nan))):
        for step, value in enumerate(values):
            repo.models.save(name, {"w": torch.tensor([value])}, step=step)
    with running_ui(tmp_path / "repo") as server:
        for ref, way_out in (
            ("net@2", "Continue from net@1,"),
            ("net@3", "Continue from net@1,"),
            ("lost@1", "Start again, with other settings: there is no earlier one"),
            ("lost@2", "Start again, with other settings: no earlier version"),
        ):
            (problem,) = server.json(f"/models/{ref}", "problems")
            assert way_out in problem["text"], ref


def test_a_model_without_metrics_or_data_says_why(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.models.save("net", {"w": [1.0]}, step=1)
    with running_ui(tmp_path / "repo") as server:
        text = texts(server.get("/models/net")[2])
    assert "none were given to the saves" in text
    assert "No consumed samples were recorded" in text


def test_a_repository_without_models_shows_how_to_make_one(tmp_path):
    datasvc.open(str(tmp_path / "repo"), create=True)
    with running_ui(tmp_path / "repo") as server:
        assert "datasvc train --repo" in server.get("/models")[2]


def test_the_pages_are_accessible_and_fit_a_narrow_window(ui, kept, page):
    for address in (f"{ui.url}/models", f"{ui.url}/models/cnn@3?last=1"):
        page.goto(address)
        check_accessible(page)
        check_width(page)
    with running_ui(kept) as server:
        page.goto(f"{server.url}/models/net@2")
        check_accessible(page)
        check_width(page)


def test_a_person_chooses_metric_and_axis_and_opens_a_version_of_the_chart(ui, page):
    page.goto(f"{ui.url}/models/cnn")
    page.locator(".chart canvas").wait_for()
    page.get_by_label("metric", exact=True).select_option("val_acc")
    page.wait_for_url("**metric=val_acc**")
    page.locator(".chart[aria-label='val_acc over step'] canvas").wait_for()
    page.get_by_label("over", exact=True).select_option("version")
    page.wait_for_url("**axis=version**")
    # The browser goes back by loading the page again: no copy of a page with inline styles is restored.
    page.evaluate("history.back()")
    page.locator(".chart[aria-label='val_acc over step'] canvas").wait_for()
    page.get_by_role("link", name="cnn@1").first.click()
    page.wait_for_url("**/models/cnn@1")


def test_the_page_works_without_scripts(ui, browser):
    context = browser.new_context(java_script_enabled=False)
    window = context.new_page()
    window.goto(f"{ui.url}/models/cnn")
    window.get_by_label("metric", exact=True).select_option("val_acc")
    window.get_by_role("button", name="Show").first.click()
    window.wait_for_url("**metric=val_acc**")
    assert window.locator("svg[aria-label='val_acc of cnn']").is_visible()
    context.close()
