import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datasvc.runs.step_table import StepTable, concat

values = st.floats(-1e6, 1e6)
rows = st.lists(st.tuples(values, values), min_size=1, max_size=60).map(
    lambda pairs: [(step, 1000.0 + step, pair) for step, pair in enumerate(pairs)]
)


@given(rows, st.integers(0, 8), st.integers(0, 8))
def test_thinning_keeps_counts_means_and_extremes_however_often_it_is_done(rows, first, second):
    table = StepTable.from_rows(("loss", "rate"), rows)
    thin = table.thin(first).thin(second)
    assert len(thin) == math.ceil(len(rows) / 2 ** max(first, second))
    assert thin.counts.sum() == len(rows)
    np.testing.assert_allclose((thin.mean * thin.counts[:, None]).sum(0), table.mean.sum(0), atol=1e-3)
    np.testing.assert_array_equal(thin.low.min(0), table.low.min(0))
    np.testing.assert_array_equal(thin.high.max(0), table.high.max(0))
    assert (thin.first[0], thin.last[-1], thin.times[-1]) == (0, len(rows) - 1, table.times[-1])
    assert (thin.first[1:] == thin.last[:-1] + 1).all()


@given(rows, st.integers(0, 8))
def test_a_stored_table_is_read_back_in_single_precision(rows, shift):
    table = StepTable.from_rows(("loss", "rate"), rows).thin(shift)
    read = StepTable.from_json(json.loads(json.dumps(table.to_json())))
    for field in ("first", "last", "counts"):
        np.testing.assert_array_equal(getattr(read, field), getattr(table, field))
    for field in ("mean", "low", "high"):
        np.testing.assert_allclose(getattr(read, field), getattr(table, field), rtol=1e-6, atol=1e-30)


def test_values_that_are_not_finite_are_stored_and_survive_thinning():
    rows = [(step, 0.0, (value,)) for step, value in enumerate([1.0, math.nan, 1e300, 2.0])]
    table = StepTable.from_rows(("loss",), rows)
    read = StepTable.from_json(json.loads(json.dumps(table.to_json(), allow_nan=False)))
    np.testing.assert_array_equal(read.mean[:, 0], [1.0, math.nan, math.inf, 2.0])
    thin = read.thin(1)
    assert math.isnan(thin.mean[0, 0])
    assert (thin.low[1, 0], thin.high[1, 0]) == (2.0, math.inf)


def test_tables_of_other_names_are_not_mixed():
    tables = [StepTable.from_rows((name,), [(1, 0.0, (1.0,))]) for name in ("loss", "rate", "loss")]
    assert [(table.names, len(table)) for table in concat(tables)] == [(("loss",), 2), (("rate",), 1)]
