"""What a reader does with charts and texts in a real browser, and that a link to what they see shows it again."""

import re

import pytest

from datasvc.ui.web.node_monitor import NodeMonitor
from tests.ui.conftest import running_ui
from tests.ui.test_look import large, node_states  # noqa: F401 - a fixture


def drag(page, chart, start, stop):
    """Select a range of a chart of uPlot, as shares of its width."""
    over = chart.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * start, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * stop, box["y"] + 60, steps=4)
    page.mouse.up()


def test_the_range_of_a_zoomed_curve_is_in_the_address_and_all_curves_have_it(large, page):  # noqa: F811
    page.goto(large.url + large.run)
    first, second = page.locator("#chart-0"), page.locator("#chart-1")
    first.locator("canvas").wait_for()
    drag(page, first, 0.25, 0.75)
    page.wait_for_url(re.compile(r"\?x=\d"))
    low, high = map(float, re.search(r"x=([\d.]+)\.\.([\d.]+)", page.url).groups())
    assert (low, high) == (pytest.approx(1 + 99 * 0.25, abs=1), pytest.approx(1 + 99 * 0.75, abs=1))
    # Both curves begin at the zoomed step: the cursor at their left end has it.
    address = page.url
    for reload in (False, True):
        if reload:
            page.goto("about:blank")
            page.goto(address)
            first.locator("canvas").wait_for()
        for chart in (first, second):
            box = chart.locator(".u-over").bounding_box()
            chart.locator(".u-over").hover(position={"x": 2, "y": box["height"] / 2})
            step = int(re.match(r"step (\d+);", chart.locator(".mark-text").text_content())[1])
            assert step == pytest.approx(low, abs=1.5)
    first.locator(".u-over").dblclick()
    page.wait_for_url(lambda url: "x=" not in url)


def test_a_zoomed_curve_stays_while_the_run_goes_on(tmp_path, page):
    import datasvc
    from datasvc.runs import RunLog

    repository = datasvc.open(str(tmp_path / "repo"), create=True).repository
    with running_ui(tmp_path / "repo") as server:
        log = RunLog.open(repository, "cnn", flush_s=0.05)
        for step in range(1, 11):
            log.report("step", step=step, loss=1 / step)
        assert log.flush()
        page.goto(f"{server.url}/runs/cnn/{log.id}?x=2..5")
        chart = page.locator("#chart-0")
        chart.locator("canvas").wait_for()
        page.get_by_text("live", exact=True).wait_for()
        log.report("step", step=11, loss=0.05)
        page.locator("#chart-0[data-points='11']").wait_for()
        over = chart.locator(".u-over")
        over.hover(position={"x": over.bounding_box()["width"] - 2, "y": 20})
        assert chart.locator(".mark-text").text_content().startswith("step 5;")
        assert "x=2..5" in page.url
        log.close()
        page.get_by_text("ended", exact=True).wait_for()
        page.goto("about:blank")


def test_hidden_parts_of_a_chart_are_in_the_address(large, page):  # noqa: F811
    page.goto(large.url + "/planner?data=pets@1&budget=150&batch=8&forward_ms=5&gradients_mb=10")
    trained = page.get_by_role("button", name="show from peers")
    trained.click()
    page.wait_for_url("**hide=from+peers**")
    page.goto("about:blank")
    page.go_back()
    page.wait_for_url("**hide=from+peers**")
    assert trained.get_attribute("aria-pressed") == "false"
    chart = page.locator("[data-chart]").filter(has=trained)
    assert [part.get_attribute("visibility") for part in chart.locator(".part").all()].count("hidden") == 1
    # They stay hidden when a slider gives new curves, and in the address of these.
    page.get_by_label("Nodes", exact=True).fill("2")
    page.wait_for_url("**nodes=2**")
    page.locator("#answer").get_by_text("2 nodes with").wait_for()
    page.wait_for_url("**hide=from+peers**")
    assert page.get_by_role("button", name="show from peers").get_attribute("aria-pressed") == "false"


def test_curves_follow_a_slider_while_it_is_dragged_and_back_undoes_the_drag(large, page):  # noqa: F811
    page.goto(large.url + "/planner?data=pets@1&budget=150&batch=8&nodes=2")
    slider = page.get_by_label("Nodes", exact=True)
    before = page.evaluate("history.length")
    for value in (5, 7):  # without "change": the reader still holds the slider
        slider.evaluate(
            "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input', {bubbles: true})); }",
            value,
        )
        page.locator("#answer").get_by_text(f"{value} nodes with").wait_for()
        page.wait_for_url(f"**nodes={value}**")
    assert page.evaluate("history.length") == before + 1
    page.go_back()
    page.locator("#answer").get_by_text("2 nodes with").wait_for()


def test_charts_of_several_nodes_share_a_cursor_and_one_node_has_a_legend(large, page, monkeypatch):  # noqa: F811
    monkeypatch.setattr(NodeMonitor, "states", lambda _monitor: node_states())
    page.goto(large.url + "/cluster")
    charts = page.locator("[data-chart=minutes]")
    assert charts.count() == 10
    charts.nth(0).focus()
    page.keyboard.press("End")
    texts = [text for text in page.locator(".charts .mark-text").all_text_contents() if text]
    assert len(texts) == 10
    assert all(text.startswith("minutes ago 0") for text in texts)
    page.goto(f"{large.url}/cluster?node={node_states()[0].url}")
    peers = page.get_by_role("button", name="show from peers")
    peers.click()
    page.wait_for_url("**hide=from+peers**")
    page.locator("[data-chart]").first.focus()
    page.keyboard.press("End")
    text = page.locator(".charts .mark-text").first.text_content()
    assert "from the origin" in text
    assert "from peers" not in text


def test_the_view_of_a_lineage_is_in_the_address(large, page):  # noqa: F811
    page.goto(large.url + "/lineage/cnn@4")
    drawing = page.locator("[data-zoom=wide] svg")
    whole = drawing.get_attribute("viewBox")
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_url("**wide=**")
    near = [round(float(text)) for text in drawing.get_attribute("viewBox").split()]
    page.reload()
    assert [round(float(text)) for text in drawing.get_attribute("viewBox").split()][:3] == near[:3]
    page.get_by_role("button", name="Whole picture").click()
    page.wait_for_url(lambda url: "wide=" not in url)
    assert drawing.get_attribute("viewBox") == whole


def keep_copied(page):
    """Let the page keep its note of what was copied: on a busy machine, a test may look after the note has gone."""
    page.add_init_script(
        "const later = window.setTimeout; window.setTimeout = (call, ms) => (ms === 1200 ? 0 : later(call, ms));"
    )


@pytest.mark.parametrize("is_https", [True, False])
def test_a_digest_is_copied_whole_by_a_click_and_by_the_keyboard(ui, browser, is_https):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    window = context.new_page()
    keep_copied(window)
    if not is_https:  # pages of other machines over HTTP have no clipboard
        window.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    window.goto(ui.url + "/datasets/pets@2")
    digests = window.locator("[data-copy].digest")
    for number, copy in enumerate((lambda each: each.click(), lambda each: each.press("Enter"))):
        digest = digests.nth(number)
        copy(digest)
        window.locator(f".digest.copied[data-copy='{digest.get_attribute('data-copy')}']").first.wait_for()
        window.get_by_label("Where (SQL)").fill("")
        window.get_by_label("Where (SQL)").press("Control+v")
        assert window.get_by_label("Where (SQL)").input_value() == digest.get_attribute("data-copy")
        assert len(digest.get_attribute("data-copy")) == 64
    context.close()


def test_the_command_of_a_menu_is_copied(ui, page):
    keep_copied(page)
    page.goto(ui.url + "/datasets")
    page.get_by_text("as …").first.click()
    page.get_by_text("datasvc ls --json").click()
    page.locator("pre.copied").wait_for()
    assert page.locator("#said").text_content() == "copied"
