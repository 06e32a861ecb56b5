"""Names of wrappers are the same on ranks that have made different many before."""

import pytest

from datasvc.trainer.optim import parameter_names
from datasvc.trainer.optim.parameter_names import next_number, raise_counts


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    monkeypatch.setattr(parameter_names, "_counts", type(parameter_names._counts)())


def test_each_kind_is_counted_by_itself_and_no_number_comes_twice():
    assert [next_number("gradients") for _ in range(3)] == [0, 1, 2]
    assert next_number("adasum") == 0


def test_a_newcomer_goes_on_where_those_that_stayed_are(monkeypatch):
    next_number("gradients")
    others = {"gradients": 5, "sync_batch_norm": 2}
    monkeypatch.setattr("datasvc.trainer.optim.parameter_names.allgather_object", lambda mine, name: [mine, others])
    raise_counts()
    assert [next_number(kind) for kind in ("gradients", "sync_batch_norm", "adasum")] == [5, 2, 0]
