"""Images that are too small for a model, told before a layer in its depth runs out of pixels."""

from __future__ import annotations

import torch

from datasvc.errors import ConfigError


def require_image_size(images: torch.Tensor, minimum: int, model: str) -> None:
    """Check that every pooling of a model has something to pool.

    Args:
        images: `[batch, channels, height, width]`.
        minimum: of height and width, in pixels.
        model: for the message.

    Raises:
        ConfigError: the images are smaller, or are no batch of images.
    """
    if images.dim() != 4:
        raise ConfigError(
            f"{model} takes images as [batch, channels, height, width]; these have the shape {list(images.shape)}"
        )
    height, width = images.shape[-2:]
    if height < minimum or width < minimum:
        raise ConfigError(f"{model} takes images from {minimum}x{minimum} pixels up; these have {height}x{width}")
