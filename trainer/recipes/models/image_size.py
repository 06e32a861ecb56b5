"""Check of the image size before the forward pass; without it, an inner layer raises an error without the size."""

from __future__ import annotations

import torch

from datasvc.errors import ConfigError


def require_image_size(images: torch.Tensor, minimum: int, model: str) -> None:
    """Check that images are large enough for every pooling of a model.

    Args:
        images: `[batch, channels, height, width]`.
        minimum: smallest height and width, pixels.
        model: name of the model for the message.

    Raises:
        ConfigError: the images are smaller, or have not four dimensions.
    """
    if images.dim() != 4:
        raise ConfigError(
            f"images for {model} have the shape {list(images.shape)}; expected [batch, channels, height, width]"
        )
    height, width = images.shape[-2:]
    if height < minimum or width < minimum:
        raise ConfigError(f"images for {model} have {height}x{width} pixels; expected at least {minimum}x{minimum}")
