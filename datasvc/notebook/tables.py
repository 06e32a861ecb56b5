"""Rows of values as Arrow tables and pandas frames."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install

if TYPE_CHECKING:
    import pandas as pd


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
