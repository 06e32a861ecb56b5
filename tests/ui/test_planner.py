"""The page Planner: equal to `datasvc plan cache --json` and to the prediction of steps."""

import html as html_module
import json
import re
import shlex

import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.cost import format_money
from datasvc.planning.prediction import predict
from datasvc.planning.step import StepCosts
from datasvc.ui.pages.planner_form import PlannerForm
from datasvc.ui.settings import UiSettings
from datasvc.ui.web.page import Query
from tests.cli.command import run
from tests.ui.conftest import check_accessible, check_width, running_ui, texts

COSTS = {
    **dict.fromkeys(("io_s", "ahead_s"), 0.004),
    **dict.fromkeys(("caller_s", "transfer_s", "launch_s", "skew_s", "update_s"), 0.0),
    "forward_s": 0.01,
    "backward_s": 0.02,
    "messages": [{"size_bytes": 1000, "ready_s": 0.02, "reduce_s": 0.001}],
    "samples": 32,
}


@pytest.mark.parametrize(
    "query",
    [
        "data=pets@1&budget=150&batch=8&nodes=2",
        "data=pets@1&budget=150&shuffle=global&batch=8&peers=no",
        "data=pets@1&budget=140&lanes=2&block=3&nodes=2&batch=4&origin=1&images_per_second=1000",
        "data=pets@1&split=val&shuffle=none&budget=150&batch=4&gpus=2&forward_ms=1&backward_ms=2",
    ],
)
def test_the_forecast_is_that_of_the_command_on_the_page(ui, query):
    page = ui.json(f"/planner?{query}", "plan")
    html = ui.get(f"/planner?{query}")[2]
    command = html.partition('data-copy="datasvc plan cache')[2].partition('"')[0]
    printed = json.loads(run("plan", "cache", *shlex.split(command)).stdout)
    assert page == printed
    assert printed["first_epoch"]["used_bytes"] > 0


PRICES = """currency = "<b>EUR</b>"
origin = {requests_per_million = 1500000.0, egress_per_gb = 250000}
peers = {egress_per_gb = 125000}
"""


def test_with_prices_the_page_shows_the_cost_as_the_command_does(filled, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    with running_ui(filled, prices=prices) as server:
        for query, rows in (("", 2), ("&epochs=90", 3)):
            address = f"/planner?data=pets@1&budget=150&batch=8&nodes=2{query}"
            html = server.get(address)[2]
            command = html_module.unescape(html.partition('data-copy="datasvc plan cache')[2].partition('"')[0])
            planned = server.json(address, "plan")
            assert planned == json.loads(run("plan", "cache", *shlex.split(command)).stdout)
            cost = planned["cost"]
            table = html.partition('<section aria-label="Cost">')[2].partition("</section>")[0]
            assert table.count("<tr>") == 1 + rows
            for epoch in filter(None, (cost["first_epoch"], cost["later_epochs"], cost["run"])):
                assert f'<td class="number">{format_money(epoch["total"])}</td>' in table
            assert "total, &lt;b&gt;EUR&lt;/b&gt;" in table
        assert "90 epochs" in table
        assert server.get("/planner?data=pets@1&epochs=-1")[0] == 400
    prices.write_text(PRICES.replace("egress", "egres"))
    with pytest.raises(ConfigError, match="unknown key 'egres_per_gb'"):
        UiSettings(repository=str(filled), prices=prices)


def test_without_prices_the_page_has_no_cost(ui):
    address = "/planner?data=pets@1&budget=150&batch=8&epochs=3"
    assert "cost" not in ui.json(address, "plan")
    assert 'aria-label="Cost"' not in ui.get(address)[2]


def test_a_budget_below_the_window_says_what_fits(ui):
    query = "/planner?data=pets@1&shuffle=global&budget=50&nodes=1"
    assert "error" in ui.json(query, "plan")
    text = texts(ui.get(query)[2])
    assert "does not fit a budget" in text
    assert ui.json(query, "plan")["error"][:40] in text


def test_the_curve_over_budgets_reaches_twice_the_data_and_says_where_nothing_fits(ui):
    # A window of the whole data: no budget below it fits.
    html = ui.get("/planner?data=pets@1&shuffle=global&budget=125&nodes=4")[2]
    curves = " ".join(texts(html.partition('<div id="curves">')[2].partition('<div id="result">')[0]).split())
    assert "Bytes of a later epoch, all nodes" in curves
    table = html.partition('aria-label="Numbers: Bytes of a later epoch, all nodes"')[2].partition("</table>")[0]
    rows = [re.findall(r'<td class="number">(.*?)</td>', row) for row in table.split("<tr>")[2:]]
    by_share = {float(share): any(cells) for share, *cells in rows}
    assert {125, 150, 200} <= {round(share) for share in by_share}
    drawn = sorted(share for share, is_drawn in by_share.items() if is_drawn)
    empty = sorted(by_share.keys() - set(drawn))
    assert 0 < len(empty) < len(by_share)
    assert (
        f"Below {drawn[0]:.3g} % of the data there is no point: the window of this order does not fit a budget of "
        f"{empty[-1]:.3g} % or less."
    ) in curves
    windowed = ui.get("/planner?data=pets@1&shuffle=none&peers=no&budget=150&batch=4")[2]
    assert "all nodes together read" in " ".join(texts(windowed).split())


def test_steps_are_predicted_from_the_numbers_of_the_form():
    form = PlannerForm.parse(Query(forward_ms="10", backward_ms="20", gradients_mb="100", nodes="4", link="8"))
    found = form.predict_steps()
    by_nodes = {each.cluster.num_nodes: each for each in found.predictions}
    assert by_nodes[1].step_s["overlapped"] == pytest.approx(0.03)
    # A ring sends 2 * 3/4 of the gradients of 100 MB over 1 GB/s, after the backward pass or beside it.
    assert by_nodes[4].step_s["prefetched"] == pytest.approx(0.03 + 0.15 + 8 * 6 * 50e-6, rel=1e-6)
    assert 0.15 < by_nodes[4].step_s["overlapped"] < by_nodes[4].step_s["prefetched"]
    assert found.samples_per_s(4) == pytest.approx(4 * 256 / by_nodes[4].step_s["overlapped"])
    assert found.limit.startswith("communication-bound")


def test_the_answer_comes_before_the_form_in_plain_words(ui):
    query = "data=pets@1&budget=150&batch=8&forward_ms=5&gradients_mb=100&origin=100&link=100"
    html = ui.get(f"/planner?{query}")[2]
    answer = " ".join(texts(html.partition('<form id="planner"')[0]).split())
    assert "The run does not starve." in answer
    assert "communication limits it: the all-reduces take" in answer
    assert "t_c" not in html.partition('id="result"')[0].replace('"t_c', "")
    assert "A line at the upper edge is above it" in html
    assert "microseconds" in html


def test_steps_are_predicted_from_the_costs_of_a_profile():
    form = PlannerForm.parse(Query(costs=json.dumps({"costs": COSTS}), nodes="2", gpus="4", link="100"))
    found = form.predict_steps()
    expected = predict(StepCosts.from_dict(COSTS), Cluster(2, Link(12.5e9, 50e-6), 4))
    assert next(each for each in found.predictions if each.cluster.num_nodes == 2) == expected


def test_without_times_of_a_step_nothing_is_predicted(ui):
    assert PlannerForm.parse(Query()).predict_steps() is None
    assert "steps" not in json.loads(ui.get("/api/planner?budget=150&batch=8")[2])


@pytest.mark.parametrize(
    "query", ["nodes=0", "nodes=65", "budget=x", "forward_ms=-1", "forward_ms=nan", "shuffle=odd", "batch=0"]
)
def test_values_out_of_range_are_refused(ui, query):
    assert ui.get(f"/planner?{query}")[0] == 400


@pytest.mark.parametrize("costs", ["{", "[]", "{}"])
def test_costs_that_are_none_are_a_problem_of_the_page(ui, costs):
    status, _, html = ui.get(f"/planner?budget=150&batch=8&costs={costs}")
    assert status == 200
    assert "the time of steps is not predicted" in html


def test_an_empty_repository_still_predicts_steps(tmp_path):
    datasvc.open(str(tmp_path / "repo"), create=True)
    with running_ui(tmp_path / "repo") as server:
        assert server.json("/planner?forward_ms=1", "steps")["nodes"][0]["step_s"]["overlapped"] == 0.001


def test_the_curves_follow_a_slider(ui, page):
    page.goto(ui.url + "/planner?data=pets@1&budget=150&batch=8&nodes=2")
    page.get_by_text("2 nodes with").wait_for()
    page.get_by_label("Nodes", exact=True).fill("4")
    assert page.locator("output[for=nodes]").text_content() == "4"
    page.get_by_label("Nodes", exact=True).dispatch_event("change")
    page.get_by_text("4 nodes with").wait_for()
    assert "nodes=4" in page.url
    check_accessible(page)
    check_width(page)


def test_the_form_works_without_scripts(ui, browser):
    context = browser.new_context(java_script_enabled=False)
    window = context.new_page()
    window.goto(ui.url + "/planner?data=pets@1&budget=150&batch=8&forward_ms=5")
    window.get_by_label("GPUs per node").fill("2")
    window.get_by_role("button", name="Plan").click()
    window.get_by_role("cell", name="2", exact=True).first.wait_for()
    assert "gpus=2" in window.url
    assert window.get_by_label("Forward pass, ms").input_value() == "5.0"
    context.close()
