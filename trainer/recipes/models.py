"""Reference models by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import nn

from datasvc.errors import ConfigError


def small_cnn(num_classes: int) -> nn.Module:
    """Return four strided convolutions with group normalisation: for small images, about 100,000 parameters."""
    widths = (16, 32, 64, 128)
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


MODELS: Final[dict[str, Callable[[int], nn.Module]]] = {"small-cnn": small_cnn}


def build_model(name: str, num_classes: int) -> nn.Module:
    """Return a freshly initialised model. Raises ConfigError, naming those that exist."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}; there are: {', '.join(sorted(MODELS))}")
    return MODELS[name](num_classes)
