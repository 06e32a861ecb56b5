"""Costs that are counted on the meta device, against real models."""

import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.planning.model_costs import transformer_costs
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.models.gpt import TransformerBlock
from datasvc.trainer.recipes.planning.count_costs import count_costs, run_forward


class CausalBlock(TransformerBlock):
    """A block whose only argument is its input."""

    def forward(self, x):
        return super().forward(x, None)


def test_the_parameters_of_a_gpt_are_those_of_the_model():
    options = {"layers": 2, "heads": 2, "width": 8, "context": 16}
    for tied in (True, False):
        model = build_model("gpt", 10, **options, tie_weights=tied)
        costs = count_costs("gpt", 10, {**options, "tie_weights": tied}, tokens=8)
        assert costs.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert (costs.layers, costs.heads, costs.width, costs.tokens) == (2, 2, 8, 8)


def test_gpt_2_has_the_parameters_of_its_paper():
    costs = count_costs("gpt2", 50257, {})
    assert (costs.parameters, costs.tokens) == (124_439_808, 1024)


def test_the_flops_and_activations_of_a_block_are_those_that_a_forward_pass_has():
    heads, width, tokens = 4, 64, 32
    with torch.device("meta"):
        block = CausalBlock(width, heads, 0.0)
        x = torch.zeros(2, tokens, width, requires_grad=True)
    flops, kept = run_forward(block, x)
    costs = transformer_costs("gpt", layers=1, heads=heads, width=width, vocabulary=1, tokens=tokens).block
    assert flops / 2 == costs.forward_flops
    # The meta device stores the attention matrix, and norms store a mean and a deviation.
    matrix, statistics = heads * tokens**2, 2 * 2 * tokens
    assert kept / 2 - matrix - statistics == pytest.approx(costs.kept_elements + costs.split_elements, rel=0.01)


def test_the_costs_of_resnet_50_are_those_that_are_published():
    costs = count_costs("resnet50", 1000, {})
    assert costs.parameters == 25_557_032
    # 4.1 billion multiply-adds at 224 pixels (He et al. 2016 count 3.8 without the stride in the 3x3 convolution).
    assert costs.forward_flops == pytest.approx(2 * 4.09e9, rel=0.01)
    assert costs.heads is None
    larger = count_costs("resnet50", 1000, {}, size=448)
    assert larger.block.kept_elements == pytest.approx(4 * costs.block.kept_elements, rel=0.01)


def test_blocks_longer_than_the_context_are_refused():
    with pytest.raises(ConfigError, match="--block-tokens is 32; expected at most the model's context of 16"):
        count_costs("gpt", 10, {"context": 16, "layers": 1}, tokens=32)


def test_a_model_that_does_not_take_the_samples_is_refused():
    with pytest.raises(ConfigError, match=r"'small-cnn' does not take samples of shape \[16\].* set --size"):
        count_costs("small-cnn", 10, {}, tokens=16)
