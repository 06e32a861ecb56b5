"""The common parts of the convolutional models: initial weights, and the check of the image size."""

from __future__ import annotations

import torch
from torch import nn

from datasvc.errors import ConfigError


def initialise(model: nn.Module) -> None:
    """Initialise the 2-D convolutions, fully connected layers and 2-D batch normalisations of a model, in place.

    Convolutions: zero-mean Gaussian with variance 2 / fan-out (He et al. 2015, arXiv:1502.01852, equation 14).
    Fully connected layers: zero-mean Gaussian with standard deviation 0.01 (Krizhevsky et al. 2012, section 5; Goyal
    et al. 2017, section 5.1). Batch normalisation: scale 1. All biases of these layers: 0. Other layers: unchanged.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
        else:
            continue  # torch's own initialisation stays
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def require_image_size(images: torch.Tensor, minimum: int, model: str) -> None:
    """Check that images `[batch, channels, height, width]` are large enough for every pooling of a model.

    Without this check, a layer inside the model would fail with an error that does not name the size. `minimum` is in
    pixels; `model` is the name in the message.

    Raises:
        ConfigError: the images are smaller, or do not have four dimensions.
    """
    if images.dim() != 4:
        raise ConfigError(
            f"images for {model} have the shape {list(images.shape)}; expected [batch, channels, height, width]"
        )
    height, width = images.shape[-2:]
    if height < minimum or width < minimum:
        raise ConfigError(f"images for {model} have {height}x{width} pixels; expected at least {minimum}x{minimum}")
