"""Planner: what a run would read from where, and how long its steps would take, on clusters of different sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

from datasvc.drawing import ChartMark, ChartSeries, chart_table, line_chart
from datasvc.errors import CacheFullError, ConfigError, DatasvcError
from datasvc.planning.cache import Forecast
from datasvc.planning.cost import Prices
from datasvc.planning.prediction import StepPrediction
from datasvc.planning.run_plan import PlanOptions, RunPlan, plan_run
from datasvc.shards.format.shard_table import ShardTable
from datasvc.sizes import format_size
from datasvc.ui.pages.histogram_charts import CHART_WIDTH
from datasvc.ui.pages.planner_form import NUMBERS, SLIDERS, PlannerForm
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site

# Curves have some ten points, so each is simulated with fewer shards than the plan itself.
_MAX_CURVE_SHARDS: Final = 2000
_BUDGET_SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
_MAX_NAMES: Final = 200
_FED_LIMIT: Final = 2.0  # times what is trained: what feeds more is drawn at the upper edge
_USUAL_SPLIT: Final = "train"


@dataclass(frozen=True)
class PlannedSplit:
    """A split of a version; equal splits have equal tables."""

    ref: str
    name: str
    table: ShardTable = field(compare=False, repr=False)


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return the forecast for the settings of the form, with curves over the budget and the number of nodes."""
    form = PlannerForm.parse(query)
    names = site.repo.datasets.names()
    data = form.data or site.first_dataset()
    problems: list[Problem] = []
    panels: dict[str, Panel] = {}
    view: dict[str, Any] = {
        "site": site,
        "form": form,
        "names": names[:_MAX_NAMES],
        "charts": [],
        "plan": None,
        "version": form.data,
        "split": "",
        "splits": [],
        "sliders": SLIDERS,
        "numbers": NUMBERS,
    }
    try:
        steps = form.predict_steps()
    except ConfigError as error:
        steps = None
        problems.append(Problem(f"the time of steps is not predicted: {error}"))
    if steps is not None:
        line = "from datasvc.ui.pages.planner_form import PlannerForm"
        panels["steps"] = Panel(steps.to_dict(), python=f"{line}\n{form!r}.predict_steps().to_dict()")
        view["charts"] += _step_charts(steps, form)
    if data is not None:
        _add_plan(site, form, data, steps, panels, problems, view)
    return Page(
        template="planner.html",
        title="Planner",
        section="planner",
        crumbs=(Crumb("Planner", "/planner"),),
        problems=tuple(problems),
        panels=panels,
        view={**view, "steps": steps},
    )


def _add_plan(
    site: Site,
    form: PlannerForm,
    data: str,
    steps: StepPrediction | None,
    panels: dict[str, Panel],
    problems: list[Problem],
    view: dict[str, Any],
) -> None:
    """Add the forecast of the caches to the panels and the view, or the reason why there is none to the problems."""
    version = str(site.repo.datasets.resolve(data))
    splits = site.repo.dataset(version)
    # The form still has the split of the data set that was chosen before.
    usual = [form.split, _USUAL_SPLIT, *splits]
    split = next((name for name in usual if name in splits), None)
    if split is None:
        problems.append(Problem(f"{version} has no splits, so there is nothing to plan"))
        return
    if form.split and form.split != split:
        problems.append(Problem(f"{version} has no split {form.split!r}; {split!r} is planned", severity="warning"))
    planned = PlannedSplit(version, split, splits[split].table)
    table, prices = planned.table, site.settings.prices
    rate = form.images_per_second or (steps.samples_per_s(form.nodes) / form.nodes if steps else None)
    options = replace(
        form.plan_options(data_bytes=table.size_bytes, images_per_second=rate),
        prices=None if prices is None else Prices.read(prices),
        epochs=form.epochs or None if prices is not None else None,
    )
    view |= {"version": version, "split": split, "splits": list(splits), "options": options}
    values = {**_options(options, split), "--prices": None if prices is None else str(prices)}
    command = site.command("plan", "cache", version, "--json", *_flags(options), options=values)
    python = _python(site, version, split, options)
    try:
        plan = plan_run(table.positions_per_shard, table.bytes_per_shard, options)
    except CacheFullError as error:
        panels["plan"] = Panel({"error": str(error)}, command, python)
        problems.append(Problem(str(error)))
    else:
        panels["plan"] = Panel(plan.to_dict(), command, python)
        view["plan"] = plan
    view["charts"] = [*_plan_charts(planned, options, form, steps), *view["charts"]]


def _python(site: Site, version: str, split: str, options: PlanOptions) -> str:
    """Return the lines of Python that give the forecast."""
    prices = site.settings.prices
    given = repr(replace(options, prices=None))
    imports = ["from datasvc.planning.run_plan import PlanOptions, plan_run"]
    imports += ["from datasvc.planning.cache import Rates"]
    if prices is not None:
        imports += ["from datasvc.planning.cost import Prices"]
        given = given.replace("prices=None", f"prices=Prices.read({str(prices)!r})")
    table = f"table = datasvc.open({site.url!r}).dataset({version!r})[{split!r}].table"
    call = f"plan_run(table.positions_per_shard, table.bytes_per_shard, {given}).to_dict()"
    return "\n".join([*imports, table, call])


def _options(options: PlanOptions, split: str) -> dict[str, str | None]:
    """Return the options of `datasvc plan cache` with values."""
    rates = options.rates
    return {
        "--budget": str(options.budget_bytes),
        "--nodes": str(options.nodes),
        "--split": split,
        "--shuffle": options.shuffle,
        "--lanes": str(options.lanes),
        "--block": None if options.block is None else str(options.block),
        "--batch-size": str(options.batch_size),
        "--ranks-per-node": str(options.ranks_per_node),
        "--images-per-second": None if rates.samples_per_second is None else repr(rates.samples_per_second),
        "--origin-rate": None if rates.origin is None else str(int(rates.origin)),
        "--epochs": None if options.epochs is None else str(options.epochs),
        "--peer-rate": None if rates.peers is None else str(int(rates.peers)),
    }


def _flags(options: PlanOptions) -> list[str]:
    return [] if options.peers else ["--no-peers"]


def _plan_charts(
    planned: PlannedSplit, options: PlanOptions, form: PlannerForm, steps: StepPrediction | None
) -> list[dict[str, Any]]:
    """Return the curves of the caches: traffic over the budget, and what feeds and limits over the nodes."""
    data_bytes = planned.table.size_bytes
    budgets = sorted({*(int(data_bytes * share) for share in _BUDGET_SHARES), options.budget_bytes})
    by_budget = [_try_plan(planned, replace(options, budget_bytes=budget)) for budget in budgets]
    x = [100 * budget / max(data_bytes, 1) for budget in budgets]
    traffic = [
        _series("from the origin", x, by_budget, lambda found: found.later_epochs.origin_bytes, "c1"),
        _series("from peers", x, by_budget, lambda found: found.later_epochs.peer_bytes, "c0"),
        _series("from the caches", x, by_budget, lambda found: found.later_epochs.hit_bytes, "c2"),
    ]
    mark = ChartMark(
        100 * options.budget_bytes / max(data_bytes, 1),
        f"chosen budget: {format_size(options.budget_bytes)} per node",
    )
    note = _describe_gap(x, by_budget)
    title = "Bytes of a later epoch, all nodes"
    charts = [_chart(traffic, title, "bytes", "budget of a node, % of the data", mark, note=note)]
    nodes = form.node_counts()
    by_nodes = [_try_plan(planned, form.plan_options(data_bytes=data_bytes, nodes=count)) for count in nodes]
    fed: list[ChartSeries] = []
    for title, epoch, colour in (
        ("fed in the first epoch", "first_epoch", "c1"),
        ("fed later", "later_epochs", "c2"),
    ):
        values = [_fed(found, epoch, count) for found, count in zip(by_nodes, nodes, strict=True)]
        if any(value is not None for value in values):
            fed.append(ChartSeries(title, nodes, values, colour))
    if steps is not None:
        fed.append(ChartSeries("trained", nodes, [steps.samples_per_s(count) for count in nodes], "c0"))
    if fed:
        here = ChartMark(form.nodes, f"chosen: {form.nodes} nodes")
        # Caches may feed a thousand times what is trained: the question is which of them is below it.
        limit = None if steps is None else _FED_LIMIT * max(steps.samples_per_s(count) for count in nodes)
        charts.append(_chart(fed, "Samples per second of all nodes", "samples/s", "nodes", here, limit))
    return charts


def _describe_gap(shares: Sequence[float], plans: Sequence[RunPlan | None]) -> str:
    """Return for which budgets there are no points, in words; "" if all have one.

    Args:
        shares: budgets in percent of the data, ascending.
        plans: plan for each budget; None where the window does not fit.
    """
    fitting = [number for number, plan in enumerate(plans) if plan is not None]
    if not fitting:
        return f"No line: the window of this order does not fit a budget of {shares[-1]:.3g} % of the data either."
    if fitting[0] == 0:
        return ""
    return (
        f"Below {shares[fitting[0]]:.3g} % of the data there is no point: the window of this order does not fit a "
        f"budget of {shares[fitting[0] - 1]:.3g} % or less."
    )


def _step_charts(steps: StepPrediction, form: PlannerForm) -> list[dict[str, Any]]:
    """Return the curves of the prediction of steps over the nodes."""
    nodes = [prediction.cluster.num_nodes for prediction in steps.predictions]
    modes = list(steps.predictions[0].step_s)
    here = ChartMark(form.nodes, f"chosen: {form.nodes} nodes")
    times = [ChartSeries(mode, nodes, [1000 * each.step_s[mode] for each in steps.predictions]) for mode in modes]
    shares = [ChartSeries(mode, nodes, [100 * each.efficiency[mode] for each in steps.predictions]) for mode in modes]
    return [
        _chart(times, "Time of a step", "ms", "nodes", here),
        _chart(shares, "Efficiency of all nodes, relative to one rank", "%", "nodes", here),
    ]


def _chart(
    series: Sequence[ChartSeries],
    title: str,
    unit: str,
    x_label: str,
    mark: ChartMark,
    limit: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    if limit is not None and any(y is not None and y > limit for each in series for y in each.ys):
        note = "A line at the upper edge is above it; the cursor and the table have its values."
    return {
        "note": note,
        "title": title,
        "over": x_label.partition(",")[0],
        "svg": line_chart(
            series,
            title=title,
            unit=unit,
            x_label=x_label,
            marks=[mark],
            from_zero=True,
            width=CHART_WIDTH,
            y_limit=limit,
        ),
        "table": chart_table(series, title=title, unit=unit, x_label=x_label),
    }


def _series(
    name: str, x: Sequence[float], plans: Sequence[RunPlan | None], read: Callable[[Forecast], float], colour: str
) -> ChartSeries:
    return ChartSeries(name, x, [None if plan is None else read(plan.forecast) for plan in plans], colour)


def _fed(plan: RunPlan | None, epoch: str, nodes: int) -> float | None:
    """Return the samples per second that the bandwidths feed to all nodes; None: no limit, or no plan."""
    per_node = None if plan is None else getattr(plan.forecast, epoch).fed_samples_per_second
    return None if per_node is None else float(per_node * nodes)


@lru_cache(maxsize=256)  # a slider changes one setting: most points stay
def _try_plan(planned: PlannedSplit, options: PlanOptions) -> RunPlan | None:
    """Return a point of a curve; None where the window does not fit the budget."""
    try:
        table = planned.table
        return plan_run(table.positions_per_shard, table.bytes_per_shard, options, max_shards=_MAX_CURVE_SHARDS)
    except DatasvcError:
        return None
