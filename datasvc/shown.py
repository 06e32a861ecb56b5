"""Values that a notebook shows, and their rows as tables: the only way from the other packages to `datasvc.views`.

A class of values says that it is shown; `datasvc.views` has how. It is imported when the first value is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


class Shown:
    """A value that a notebook shows as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return render(self, "html")


class ShownTable(Shown):
    """A value that has rows, too."""

    __slots__ = ()

    def to_arrow(self) -> pa.Table:
        """Return the rows."""
        raise NotImplementedError

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows of `to_arrow` as a pandas frame. Raise ConfigError if pandas is not installed."""
        return to_frame(self.to_arrow())


def render(value: object, way: Literal["html", "report"]) -> str:
    """Return a value as HTML for a notebook, or as a document, its report."""
    text: str = _renderer(value, way)(value)
    return text


def plot(value: object, *names: str, ax: Axes | None) -> Axes:
    """Plot a value with matplotlib, into `ax` or a new figure."""
    axes: Axes = _renderer(value, "plot")(value, *names, ax=ax)
    return axes


def _renderer(value: object, way: str) -> Callable[..., Any]:
    # A static import would make each value depend on its picture, which depends on the value.
    find: Callable[..., Callable[..., Any]] = import_module("datasvc.views").find_renderer
    return find(type(value), way)


def rows_to_arrow(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table: a column for each name, in the order in which they occur; null where a row has none.

    A column whose values have no common type, such as a setting that was a number and then a text, has JSON texts.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def to_frame(table: pa.Table) -> pd.DataFrame:
    """Return an Arrow table as a pandas frame. Raise ConfigError if pandas is not installed."""
    try:
        import pandas as pd  # noqa: F401 - Arrow imports it, and its own message does not say what to install
    except ImportError as error:
        raise ConfigError(f"a data frame needs pandas, which is not installed: {how_to_install('pandas')}") from error
    return table.to_pandas()


def _column(values: list[Any]) -> pa.Array:
    # Arrow would turn booleans among numbers into an error, and numbers among texts too: both become JSON.
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return pa.array(
            [None if value is None else json.dumps(value, sort_keys=True, default=str) for value in values]
        )
