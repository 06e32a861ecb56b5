"""The forecast of a run as HTML for a notebook, and as a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from datasvc.drawing import Markup, TableColumn, facts_table, html_table, standalone
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from datasvc.planning.cache import Forecast

_GB: Final = 1e9


def forecast_html(forecast: Forecast) -> Markup:
    """Return sizes, and the traffic of the first and of later epochs."""
    facts: dict[str, str | float | None] = {
        "samples": forecast.num_samples,
        "shards": forecast.num_shards,
        "data": format_size(forecast.data_bytes),
        "budget of a node": format_size(forecast.budget_bytes),
        "window of the order": format_size(forecast.window_bytes),
        "resident on a node": format_size(forecast.resident_bytes),
    }
    epochs = {"first": forecast.first_epoch, "each later one": forecast.later_epochs}
    rows = [
        (name, epoch.used_bytes, epoch.hit_bytes, epoch.peer_bytes, epoch.origin_bytes, epoch.starves)
        for name, epoch in epochs.items()
    ]
    columns = [TableColumn(name, "bytes") for name in ("read", "from own caches", "from peers", "from the origin")]
    return standalone(facts_table(facts), html_table(["epoch", *columns, "starves"], rows))


def plot_forecast(forecast: Forecast, *, ax: Axes | None = None) -> Axes:
    """Plot where the bytes of an epoch come from, see `Forecast.plot`."""
    from datasvc.notebook.plots import plot_stacks

    epochs = [forecast.first_epoch, forecast.later_epochs]
    parts = {
        "own caches": [epoch.hit_bytes / _GB for epoch in epochs],
        "peers": [epoch.peer_bytes / _GB for epoch in epochs],
        "origin": [epoch.origin_bytes / _GB for epoch in epochs],
    }
    return plot_stacks(["first epoch", "each later epoch"], parts, title="traffic of an epoch", unit="GB", ax=ax)
