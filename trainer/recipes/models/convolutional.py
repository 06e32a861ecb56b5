"""The common parts of the convolutional models: initial weights, and the check of the image size."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from datasvc.errors import ConfigError

# Channels and number of the 3x3 convolutions before each of the five poolings.
_STAGES: Final = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_MIN_SIZE = 32  # each of the five poolings halves the size


_WIDTHS: Final = (16, 32, 64, 128)  # output channels of the convolutions of the small networks
_MIN_ALEXNET_SIZE = 63  # with 62 pixels, the input of the last 3x3 pooling would be only 2x2


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


def small_cnn(num_classes: int) -> nn.Module:
    """Return a network of four strided convolutions for small images, about 100,000 parameters.

    Group normalisation uses statistics of one image at a time, so results do not depend on the number of ranks.
    """
    layers = _strided_convolutions(3)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(_WIDTHS[-1] * 4, num_classes))


def keyword_cnn(num_classes: int) -> nn.Module:
    """Return a network of four strided convolutions for mel spectrograms of one channel, about 100,000 parameters.

    The last layers average over time and not over frequency, as for keywords (Sainath and Parada, Interspeech 2015).
    """
    pooling = nn.AdaptiveAvgPool2d((4, 1))
    head = nn.Linear(_WIDTHS[-1] * 4, num_classes)
    return nn.Sequential(nn.GroupNorm(1, 1), *_strided_convolutions(1), pooling, nn.Flatten(), head)


def _strided_convolutions(channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in _WIDTHS:
        layers += [
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    return layers


# The widths are those of torchvision's model: one tower with 64, 192, 384, 256 and 256 filters, without local
# response normalisation. Krizhevsky et al. 2012 have two towers with 96, 256, 384, 384 and 256 filters.


class AlexNet(nn.Module):
    """Five convolutions and three fully connected layers: 61,100,840 parameters at 1000 classes.

    Args:
        num_classes: number of classes.
        dropout: probability of dropout before each hidden fully connected layer (Krizhevsky et al. 2012, section
            4.2).
        batch_norm: whether each convolution has batch normalisation instead of a bias, as in You et al. 2017
            (arXiv:1708.03888) for training with large batches.
        hidden: width of the two hidden fully connected layers.
    """

    def __init__(
        self, num_classes: int, *, dropout: float = 0.5, batch_norm: bool = False, hidden: int = 4096
    ) -> None:
        super().__init__()

        def convolution(channels: int, width: int, kernel: int, *, stride: int = 1, padding: int) -> list[nn.Module]:
            layer = nn.Conv2d(channels, width, kernel, stride=stride, padding=padding, bias=not batch_norm)
            norm = [nn.BatchNorm2d(width)] if batch_norm else []
            return [layer, *norm, nn.ReLU(inplace=True)]

        self.features = nn.Sequential(
            *convolution(3, 64, 11, stride=4, padding=2),
            nn.MaxPool2d(3, stride=2),
            *convolution(64, 192, 5, padding=2),
            nn.MaxPool2d(3, stride=2),
            *convolution(192, 384, 3, padding=1),
            *convolution(384, 256, 3, padding=1),
            *convolution(256, 256, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(6)  # the identity for images of 224x224
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )
        initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, `[batch, classes]`, of images `[batch, 3, height, width]` from 63x63 up.

        Raises:
            ConfigError: the images are smaller.
        """
        require_image_size(images, _MIN_ALEXNET_SIZE, "AlexNet")
        x = self.pool(self.features(images))
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]
