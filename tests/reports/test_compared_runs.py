"""Two runs in one chart, which people look for first: whose curve is which, and what smoothing makes of it."""

import numpy as np
import pytest

import datasvc
from datasvc.runs import RunLog
from datasvc.ui.pages.run_comparison import smooth
from tests.ui.conftest import browser, check_accessible, check_width, page, running_ui  # noqa: F401 - fixtures


def write_run(repository, rate, steps):
    with RunLog.open(repository, "cnn", config={"rate": rate, "batch_size": 8}, data=[], world_size=1) as log:
        for step in range(1, steps + 1):
            log.report("step", step=step, loss=rate / step)
        log.close("finished", "")
    return log.ref


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    url = tmp_path_factory.mktemp("compared") / "repo"
    repository = datasvc.open(str(url), create=True).repository
    refs = [write_run(repository, 0.1, 30), write_run(repository, 0.2, 10)]
    with running_ui(url) as server:
        yield server, refs


def address(refs, **options):
    chosen = [f"run:{ref}=1" for ref in refs] + [f"{name}={value}" for name, value in options.items()]
    return f"/runs/compare?{'&'.join(chosen)}"


def test_runs_of_different_lengths_share_a_chart_by_step(compared):
    """clearml/clearml#73, aimhubio/aim#343: the chart of several runs had no smoothing."""
    ui, refs = compared
    curves = ui.json(address(refs), "curves")["loss"]
    assert list(curves) == refs
    assert [points["x"][-1] for points in curves.values()] == [30, 10]
    assert curves[refs[1]]["y"][0] == pytest.approx(0.2)
    (row,) = ui.json(address(refs), "settings")
    assert (row["name"], row["values"]) == ("rate", {refs[0]: 0.1, refs[1]: 0.2})
    assert ui.json(address(refs, smooth=0.9), "curves")["loss"][refs[0]]["y"][-1] > curves[refs[0]]["y"][-1]
    assert ui.json(address(refs, over="time"), "problems") == []


def test_a_run_that_is_not_there_leaves_the_others(compared):
    """A link that was sent to a colleague outlives one of its runs."""
    ui, refs = compared
    panels = ui.json(address([refs[0], "cnn/20200101-000000-000000000000"]))
    assert (list(panels["curves"]["loss"]), len(panels["problems"])) == ([refs[0]], 1)


def test_a_parameter_that_the_comparison_does_not_have_is_named(compared):
    """An address that is typed by hand: the page said to choose two or more runs, as if none was given."""
    ui, refs = compared
    (problem,) = ui.json(f"/runs/compare?run={refs[0]}&over=time&x=1..2", "problems")
    assert (problem["severity"], "run; expected run:NAME/ID=1" in problem["text"]) == ("warning", True)
    assert ui.json(address(refs, smooth=0.5, panel="problems")) == []


def test_the_list_of_runs_leads_to_the_chart_without_javascript(compared, browser):  # noqa: F811
    """Marks in the list and one button, on a page that works without scripts."""
    ui, refs = compared
    context = browser.new_context(java_script_enabled=False)
    window = context.new_page()
    window.goto(f"{ui.url}/runs")
    for ref in refs:
        window.get_by_label(f"Compare {ref}").check()
    window.get_by_role("button", name="Compare the chosen runs").click()
    assert window.locator("svg").count() >= 1
    assert all(window.get_by_role("link", name=ref).count() for ref in refs)
    context.close()


def test_the_comparison_is_readable_on_a_telephone(compared, page):  # noqa: F811
    """The neighbour of the comparison of versions, of which a telephone showed one."""
    ui, refs = compared
    page.goto(ui.url + address(refs, smooth=0.5))
    check_accessible(page)
    check_width(page)


@pytest.mark.parametrize("weight", [0.5, 0.9, 0.99])
def test_a_smoothed_curve_does_not_cling_to_its_first_value(weight):
    """tensorflow/tensorboard#610: the first value had far more weight than all others."""
    values = np.array([100.0, *np.ones(400)])
    smoothed = smooth(np.arange(401.0), values, weight)
    # With the bias, the first value has the weight 0.99 ** n; without, (1 - w) * w ** n / (1 - w ** (n + 1)).
    expected = 1 + 99 * (1 - weight) * weight**100 / (1 - weight**101)
    assert smoothed[100] == pytest.approx(expected)
    assert smooth(np.arange(401.0), np.full(401, 3.0), weight) == pytest.approx(np.full(401, 3.0))


def test_the_past_of_a_smoothed_curve_stays_when_the_run_goes_on():
    """tensorflow/tensorboard#3493: the curve changed at steps that were long over."""
    steps, values = np.arange(200.0), np.sin(np.arange(200.0))
    assert smooth(steps[:100], values[:100], 0.9) == pytest.approx(smooth(steps, values, 0.9)[:100])


def test_a_smoothed_curve_shows_the_gap_and_goes_on_after_it():
    """The neighbour of both: one NaN must not end the curve, nor be hidden."""
    values = np.array([1.0, np.nan, 3.0, 3.0])
    smoothed = smooth(np.arange(4.0), values, 0.5)
    assert np.isnan(smoothed[1])
    assert np.isfinite(smoothed[[0, 2, 3]]).all()
    assert 1 < smoothed[2] < smoothed[3] < 3


def test_points_that_stand_for_many_steps_are_smoothed_as_far_as_they_reach():
    """wandb/docs#1270: an average by points treats a run that was logged rarely as if it were short."""
    dense = smooth(np.arange(100.0), np.arange(100.0), 0.9)
    gap = np.array([0.0, 1, 2, 3, 4, 5, 90])
    assert smooth(gap, np.array([0.0, 1, 2, 3, 4, 5, 90]), 0.9)[-1] > dense[5] + 80
