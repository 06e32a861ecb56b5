"""Which parameters decay, and which are scaled layer by layer."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import nn

from datasvc.errors import ConfigError

Decayed = Literal["weights", "all"]
DECAYED: tuple[str, ...] = get_args(Decayed)


def group_parameters(model: nn.Module, *, weight_decay: float, decayed: str = "weights") -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, in the model's order within each.

    With "weights", what has one dimension at most is exempt from weight decay and from the layer-wise rates of LARS
    and LAMB (`adapt` is False): biases, and scale and shift of normalisations. Goyal et al. 2017, section 5.1, spare
    the latter; Jia et al. 2018 biases too.

    Args:
        model: parameters that need no gradient are left out.
        weight_decay: factor of what decays.
        decayed: "weights", or "all" for one group with everything.

    Raises:
        ConfigError: `decayed` is neither, or nothing is to be trained.
    """
    if decayed not in DECAYED:
        raise ConfigError(f"decayed is {decayed!r}; expected one of {', '.join(DECAYED)}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameters to train")
    spared = [parameter for parameter in trained if decayed == "weights" and parameter.ndim <= 1]
    weights = [parameter for parameter in trained if decayed == "all" or parameter.ndim > 1]
    groups = [
        {"params": weights, "weight_decay": weight_decay, "adapt": True},
        {"params": spared, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
