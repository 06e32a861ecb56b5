"""How the weights of the convolutional models begin."""

from __future__ import annotations

from torch import nn


def initialise(model: nn.Module) -> None:
    """Draw the weights of every layer, in place.

    Convolutions as He et al. 2015 (arXiv:1502.01852, equation 14) derive it for rectifiers: Gaussian with variance
    2 / fan-out. Fully connected layers: Gaussian with deviation 0.01 (Krizhevsky et al. 2012, section 5; Goyal et al.
    2017, section 5.1). Batch normalisation begins as the identity. All biases are 0.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
