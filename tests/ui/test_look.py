"""How the pages look in a real browser: what fits, what stays in sight, and what is drawn alike."""

import time
from urllib.parse import quote

import pytest
import torch

import datasvc
from datasvc.runs import RunLog
from datasvc.testing import small_dataset
from datasvc.ui.web.node_monitor import NodeMonitor, NodeSample, NodeState
from tests.ui.conftest import check_accessible, check_width, running_ui, save_model, texts

WIDTHS = (1280, 400)
CLASSES = 130
MAX_TEXT = 10  # pixels; smaller text cannot be read
# The text of each picture that leaves it or is too small. Lineages fit their window, so their text may be smaller.
_BAD_TEXTS = """minimum => [...document.querySelectorAll("main svg.drawing")].filter(svg => svg.checkVisibility())
  .flatMap(svg => [...svg.querySelectorAll("text")].map(text => {
    const [frame, box] = [svg.getBoundingClientRect(), text.getBoundingClientRect()];
    const size = parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a;
    const isInside = box.left >= frame.left - 1 && box.right <= frame.right + 1
      && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
    return isInside && size >= minimum ? null : `${text.textContent}: ${isInside}, ${size} px`;
  })).filter(Boolean)"""
_IN_VIEW = """element => {
  const [box, frame] = [element.getBoundingClientRect(), element.closest(".scroll").getBoundingClientRect()];
  return box.left >= frame.left - 1 && box.right <= Math.min(frame.right, innerWidth) + 1;
}"""


def node_states():
    """Return the states of two nodes that have moved terabytes."""
    cache = {
        "folder": "/cache",
        "limit_bytes": 10**13,
        "budget_bytes": 10**13,
        "resident_bytes": 10**12,
        "reserved_bytes": 0,
        "quarantined_bytes": 0,
        "pinned_bytes": 0,
        "num_resident": 12_345,
        "counters": {"hits": 10, "misses": 1, "origin_bytes": 10**12, "peer_bytes": 10**12, "evicted_bytes": 0},
        "tenants": {"default": {"used_bytes": 1, "guaranteed_bytes": 0, "maximum_bytes": None}},
        "jobs": [],
    }
    ok = {"num_ok": 5, "num_missing": 0, "num_failed": 0, "num_lying": 0, "bytes_received": 1000}
    now_s = time.time()
    urls = ["http://node-with-a-long-name-1.cluster.example:8765", "http://b:8765"]
    samples = tuple(
        NodeSample(now_s - 30 * (5 - number), 10**12 * number, (10 * number, number, 10**12 * number, 7, 0, 0))
        for number in range(6)
    )
    return [
        NodeState(url, {"cache": cache, "jobs": [], "peers": {other: ok}}, now_s, None, now_s, samples)
        for url, other in zip(urls, reversed(urls), strict=True)
    ]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The pages of a data set with 130 classes, a merged model, a run with many steps, and two busy nodes."""
    url = tmp_path_factory.mktemp("large") / "repo"
    repo = datasvc.open(str(url), create=True)
    small_dataset(repo, "pets", samples=CLASSES, classes=CLASSES)
    for step in (10, 20):
        save_model(repo, "cnn", step, "pets@1")
    save_model(repo, "cnn", 15, "pets@1", parent="cnn@1")
    state = {"model": {"fc.weight": torch.ones(2)}}
    repo.models.save(
        "cnn", state, step=30, parent="cnn@2", merged=["cnn@3"], metrics={"val_acc": 0.9, "only_here": 1.0}
    )
    with RunLog.open(repo.repository, "cnn", data=["pets@1"], world_size=2) as log:
        for step in range(1, 101):
            times = {"step_s": 0.1, "wait_s": 0.04, "forward_s": 0.02}
            log.report("step", step=step, loss=1 / step, big=1e9 * step, images_per_s=12_345.0 * step, **times)
        log.report("checkpoint", step=50, version="cnn@2")
    with (
        pytest.MonkeyPatch.context() as patch,
        running_ui(url, nodes=tuple(state.url for state in node_states()), thumbnails=url.parent / "t") as server,
    ):
        patch.setattr(NodeMonitor, "states", lambda _monitor: node_states())
        server.run = f"/runs/cnn/{log.id}"
        yield server


def pages_with_pictures(server):
    return [
        "/datasets/pets@1",
        f"/datasets/pets@1/samples/train?view=table&where={quote('label < 3')}",
        "/models/cnn@4?metric=val_acc",
        "/compare/cnn@1/cnn@2?norms=1",
        server.run,
        "/cluster",
        f"/cluster?node={quote(node_states()[0].url)}",
        "/planner?data=pets@1&budget=150&batch=8&origin=100&link=400&forward_ms=5&gradients_mb=100",
    ]


@pytest.mark.parametrize("has_scripts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_text_of_pictures_is_inside_them_and_can_be_read(large, browser, has_scripts):
    context = browser.new_context(java_script_enabled=has_scripts)
    window = context.new_page()
    for width in WIDTHS:
        window.set_viewport_size({"width": width, "height": 800})
        for path in pages_with_pictures(large):
            window.goto(large.url + path)
            assert window.locator("main svg.drawing, main canvas").count(), path
            assert window.evaluate(_BAD_TEXTS, MAX_TEXT) == [], (width, path)
        for path in ("/lineage/cnn@4", "/lineage/pets?key=00000000.jpg"):
            window.goto(large.url + path)
            assert window.evaluate(_BAD_TEXTS, 0) == [], (width, path)
    context.close()


@pytest.mark.parametrize("has_scripts", [True, False])
def test_the_whole_lineage_is_in_sight_at_first(large, browser, has_scripts):
    context = browser.new_context(java_script_enabled=has_scripts)
    window = context.new_page()
    for width in WIDTHS:
        window.set_viewport_size({"width": width, "height": 800})
        window.goto(large.url + "/lineage/cnn@4")
        nodes = [node for node in window.locator("main svg .node").all() if node.is_visible()]
        assert len(nodes) > 4
        assert all(node.evaluate(_IN_VIEW) for node in nodes)
        assert window.evaluate(_BAD_TEXTS, MAX_TEXT) == []
    # A window in which the graph has no room at its full size.
    window.set_viewport_size({"width": 800, "height": 800})
    assert all(node.evaluate(_IN_VIEW) for node in window.locator(".wide-window svg .node").all())
    context.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_head_of_a_long_table_stays(large, page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{large.url}/datasets/pets@1/samples/train?view=table")
    frame = page.get_by_role("region", name="Table of samples")
    assert frame.locator("tbody tr").count() == 100
    frame.evaluate("element => element.scrollTo(0, 2000)")
    assert frame.evaluate("element => element.scrollTop") > 1000
    (top, head_top) = (frame.bounding_box()["y"], frame.locator("thead").bounding_box()["y"])
    assert head_top == pytest.approx(top, abs=2)
    # A row that the keyboard reaches is not below the head.
    for _ in range(100):
        page.keyboard.press("j")
    for _ in range(30):
        page.keyboard.press("k")
    marked, head = frame.locator("tr.marked").bounding_box(), frame.locator("thead").bounding_box()
    assert marked["y"] >= head["y"] + head["height"] - 2


def test_a_merge_is_drawn_with_its_second_parent_named_and_linked(large, page):
    page.goto(large.url + "/models/cnn@4")
    graph = page.get_by_role("group", name="versions of cnn")
    # Three lines: from the merge to both parents, and from one of these to its own.
    assert graph.locator("path").count() == 3
    assert "from cnn@2 and cnn@3" in texts(graph.inner_html())
    page.get_by_text("These versions as a table").click()
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="cnn@4"))
    assert row.get_by_role("link").all_text_contents() == ["cnn@4", "cnn@2", "cnn@3"]
    row.get_by_role("link", name="cnn@3").click()
    page.wait_for_url("**/compare/cnn@3/cnn@4")


def test_many_classes_are_sorted_divided_and_searched(large, page):
    page.goto(large.url + "/datasets/pets@1")
    table = page.get_by_role("table", name="Classes of train, largest first")
    assert table.locator("tbody tr").count() == 100
    page.get_by_role("navigation", name="Pages of classes").get_by_role("link", name="next").click()
    page.wait_for_url("**classes_page=1**")
    assert table.locator("tbody tr").count() == CLASSES - 100
    page.get_by_role("table", name="Classes of train").get_by_role("link", name="class", exact=True).click()
    page.wait_for_url("**classes_sort=name**")
    first = page.get_by_role("table", name="Classes of train").locator("tbody th").first
    assert first.text_content() == "class0"
    page.get_by_label("Name contains").fill("class12")
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**class=class12**")
    assert page.get_by_text("11 of 130 classes.").is_visible()
    check_accessible(page)
    check_width(page)


def test_a_click_on_a_head_sorts_and_back_returns(large, page):
    page.goto(large.url + "/cluster")
    table = page.get_by_role("table", name="Nodes")
    urls = [state.url for state in node_states()]
    table.get_by_role("link", name="node", exact=True).click()
    page.wait_for_url("**nodes_sort=url**")
    assert table.locator("tbody th").all_text_contents() == sorted(urls)
    assert table.locator("[aria-sort=ascending]").text_content().strip().startswith("node")
    table.get_by_role("link", name="node", exact=True).click()
    page.wait_for_url("**nodes_sort=-url**")
    assert table.locator("tbody th").all_text_contents() == sorted(urls, reverse=True)
    page.go_back()
    page.wait_for_url("**nodes_sort=url**")
    # Whom a node reads from is a link to its page.
    page.get_by_role("table", name="What each node received").get_by_role("link", name=urls[1]).first.click()
    page.wait_for_url("**/cluster?node=**")


def test_a_metric_with_a_curve_is_shown_first(large):
    html = large.get("/models/cnn@4")[2]
    assert '<option value="val_acc" selected>' in html
    one = " ".join(texts(large.get("/models/cnn@4?metric=only_here")[2]).split())
    assert "only_here has one value: 1 at step 30." in one


def test_warnings_alone_are_not_red(large, page):
    page.goto(f"{large.url}/planner?data=pets@1&split=val&budget=150&batch=8")
    box = page.get_by_role("region", name="Warnings")
    assert box.get_by_role("heading").text_content() == "1 warning"
    colours = page.evaluate(
        "['--warning-page', '--error-page'].map(n => getComputedStyle(document.documentElement).getPropertyValue(n))"
    )
    shown = box.evaluate("element => getComputedStyle(element).backgroundColor")
    channels = [int(text) for text in shown.removeprefix("rgb(").removesuffix(")").split(",")]
    assert channels == [int(colours[0].lstrip("#")[at : at + 2], 16) for at in (0, 2, 4)]
    assert colours[0] != colours[1]
