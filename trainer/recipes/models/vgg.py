"""VGG-16 (Simonyan and Zisserman 2015, "Very Deep Convolutional Networks", arXiv:1409.1556, configuration D)."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from datasvc.trainer.recipes.models.convolutional import initialise, require_image_size

# Channels and number of the 3x3 convolutions before each of the five poolings.
_STAGES: Final = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_MIN_SIZE = 32  # each of the five poolings halves the size


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions and three fully connected layers: 138,357,544 parameters at 1000 classes.

    Args:
        num_classes: number of classes.
        batch_norm: whether each convolution is followed by batch normalisation. The convolution then still has a
            bias, as in the published weights. Without normalisation, training needs a small learning rate and a
            long warm-up.
        dropout: probability of dropout after each hidden fully connected layer (section 3.1).
        hidden: width of the two hidden fully connected layers.
    """

    def __init__(
        self, num_classes: int, *, batch_norm: bool = False, dropout: float = 0.5, hidden: int = 4096
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, depth in _STAGES:
            for _ in range(depth):
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                layers += [nn.BatchNorm2d(width)] if batch_norm else []
                layers.append(nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)  # the identity for images of 224x224
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, `[batch, classes]`, of images `[batch, 3, height, width]` of at least 32x32 pixels.

        Raises:
            ConfigError: the images are smaller than 32x32.
        """
        require_image_size(images, _MIN_SIZE, "VGG-16")
        x = self.pool(self.features(images))
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]
