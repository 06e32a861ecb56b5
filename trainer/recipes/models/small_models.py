"""A small convolutional network: the default model of image data, also used by the tests."""

from __future__ import annotations

from torch import nn


def small_cnn(num_classes: int) -> nn.Module:
    """Return a network of four strided convolutions for small images, about 100,000 parameters.

    Group normalisation uses statistics of one image at a time, so results do not depend on the number of ranks.
    """
    widths = (16, 32, 64, 128)  # output channels of each convolution
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        layers += [
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(channels * 4, num_classes))
