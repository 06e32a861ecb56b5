import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.optimizers.scaling import scale_rate

BATCHES = st.integers(1, 1 << 17)


@given(BATCHES, st.integers(1, 64))
def test_k_times_the_batch_has_k_times_the_rate_or_its_root(batch, k):
    def scaled(rule, of):
        return scale_rate(0.1, rule=rule, global_batch=of, reference_batch=256)

    assert scaled("linear", k * batch) == pytest.approx(k * scaled("linear", batch))
    assert scaled("sqrt", k * batch) == pytest.approx(k**0.5 * scaled("sqrt", batch))
    assert scaled("none", k * batch) == 0.1


@pytest.mark.parametrize("change", [{"rule": "cubic"}, {"global_batch": 0}, {"reference_batch": 0}])
def test_what_cannot_be_scaled_is_refused(change):
    with pytest.raises(ConfigError):
        scale_rate(0.1, **{"rule": "linear", "global_batch": 32, "reference_batch": 256, **change})
