"""Costs of models: the papers' formulas, and what real models have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.planning.model_costs import ModelCosts, PartCosts, transformer_costs

sizes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 100),
        "heads": st.just(4),
        "width": st.integers(1, 100).map(lambda number: 4 * number),
        "vocabulary": st.integers(1, 10**5),
        "tokens": st.integers(1, 4096),
    }
)


@given(sizes)
def test_parameters_and_flops_are_those_of_narayanan(size):
    costs = transformer_costs("gpt", **size)
    layers, h, s, vocabulary = (size[name] for name in ("layers", "width", "tokens", "vocabulary"))
    # Narayanan et al. 2021, equation 2, which leaves out the last norm.
    equation_2 = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))
    assert costs.parameters == pytest.approx(equation_2 + 2 * h)
    # Equation 3: forward, backward and the recomputation of the blocks.
    equation_3 = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    flops = 3 * costs.forward_flops + layers * costs.block.forward_flops
    assert flops == pytest.approx(equation_3)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_are_those_of_korthikanti(tensor):
    s, h = 2048, 12288
    costs = transformer_costs("gpt-3", layers=96, heads=96, width=h, vocabulary=50257, tokens=s, dropout=0.1)
    # Section 4.2.1, 16-bit activations, without the attention matrix: s b h (10 + 24 / t).
    assert costs.block.activation_bytes(2, tensor) == s * h * (10 + 24 / tensor)


def test_gpt_3_has_its_number_of_parameters():
    costs = transformer_costs("gpt-3", layers=96, heads=96, width=12288, vocabulary=50257, tokens=2048)
    assert costs.parameters == pytest.approx(175e9, rel=0.01)


def test_untied_weights_are_parameters_of_the_last_part():
    options = {"layers": 2, "heads": 1, "width": 8, "vocabulary": 100, "tokens": 4}
    tied, untied = transformer_costs("gpt", **options), transformer_costs("gpt", **options, tied=False)
    assert untied.parameters - tied.parameters == tied.tied_parameters == 800
    assert untied.tied_parameters == 0


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="layers is 0"):
        ModelCosts("m", "images", PartCosts(), PartCosts(), PartCosts(), layers=0)
