"""Groups the parameters of a model for an optimizer.

By default, biases and normalisations have neither weight decay nor the layer-wise rates of LARS and LAMB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from datasvc.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Decayed = Literal["weights", "all"]


def group_parameters(model: nn.Module, *, weight_decay: float, decayed: Decayed = "weights") -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer; parameters keep the model's order within a group.

    With `decayed="weights"`, parameters of at most one dimension (biases, scale and shift of normalisations) have no
    weight decay and no layer-wise rate of LARS or LAMB (`adapt` is False). Goyal et al. 2017, section 5.1, exclude
    normalisations; Jia et al. 2018 exclude biases too.

    Args:
        model: model to train; parameters that need no gradient are left out.
        weight_decay: weight decay of the parameters that are not exempt.
        decayed: "weights", or "all" for one group with all parameters.

    Raises:
        ConfigError: `decayed` has another value, or no parameter needs a gradient.
    """
    if decayed not in get_args(Decayed):
        raise ConfigError(f"decayed is {decayed!r}; expected one of {', '.join(get_args(Decayed))}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError(
            "the model has no parameters to train; expected at least one parameter with requires_grad=True"
        )
    # Biases and the scales of normalisations have one dimension; weights of layers have two or more.
    exempt = [parameter for parameter in trained if decayed == "weights" and parameter.ndim <= 1]
    weights = [parameter for parameter in trained if decayed == "all" or parameter.ndim > 1]
    groups = [
        {"params": weights, "weight_decay": weight_decay, "adapt": True},
        {"params": exempt, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
