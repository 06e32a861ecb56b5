"""Inception-V3 (Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567).

The widths are those of the published weights (TensorFlow and torchvision): the paper's table 1 with its figures 5 to
7, and an auxiliary classifier on the 17x17 grid. Initial weights are as in the other convolutional models here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import nn

from datasvc.trainer.recipes.models.convolutional import initialise, require_image_size

_MIN_SIZE: Final = 75  # with 74 pixels, the last grid would be empty
_MIN_SIZE_OF_AUXILIARY: Final = 299  # with 298 pixels, its 5x5 convolution would have an input of 4x4
_AUXILIARY_WEIGHT: Final = 0.4  # of TensorFlow's training program; the paper gives none


class InceptionV3(nn.Module):
    """Eleven blocks of parallel convolutions: 27,161,264 parameters at 1000 classes, 23,834,568 without auxiliary.

    In evaluation, or without the auxiliary classifier, the output is the logits. In training with it, the output is
    `LogitsWithAuxiliary`; `combine_losses` adds its loss with the weight 0.4.

    Args:
        num_classes: number of classes.
        auxiliary: whether the model has an auxiliary classifier, which needs images of at least 299x299 in training.
        dropout: probability of dropout before the classifier; the published weights have 0.5.
    """

    def __init__(self, num_classes: int, *, auxiliary: bool = True, dropout: float = 0.5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, 32, 3, stride=2),
            _convolution(32, 32, 3),
            _convolution(32, 64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            _convolution(64, 80, 1),
            _convolution(80, 192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.grid_35 = nn.Sequential(_make_block_35(192, 32), _make_block_35(256, 64), _make_block_35(288, 64))
        self.grid_17 = nn.Sequential(_reduce_to_17(288), *(_make_block_17(width) for width in (128, 160, 160, 192)))
        self.auxiliary = _make_auxiliary(768, num_classes) if auxiliary else None
        self.grid_8 = nn.Sequential(_reduce_to_8(768), _make_block_8(1280), _make_block_8(2048))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2048, num_classes)
        initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor | LogitsWithAuxiliary:
        """Return logits, `[batch, classes]`, of images `[batch, 3, height, width]` from 75x75 up; usual are 299x299.

        In training with the auxiliary classifier, images have at least 299x299 pixels, and the output is
        `LogitsWithAuxiliary`.

        Raises:
            ConfigError: the images are smaller.
        """
        if self.training and self.auxiliary is not None:
            require_image_size(images, _MIN_SIZE_OF_AUXILIARY, "the training of Inception-V3 with auxiliary=true")
        require_image_size(images, _MIN_SIZE, "Inception-V3")
        grid_17 = self.grid_17(self.grid_35(self.stem(images)))
        x = self.pool(self.grid_8(grid_17))
        logits: torch.Tensor = self.classifier(self.dropout(x.flatten(1)))
        if not self.training or self.auxiliary is None:
            return logits
        return LogitsWithAuxiliary(logits, (self.auxiliary(grid_17),), _AUXILIARY_WEIGHT)


class Branches(nn.Module):
    """Parallel branches over one input, whose outputs are concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[batch, sum of the branches' channels, height, width]` of an input `[batch, channels, ...]`."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def _convolution(
    channels: int, width: int, kernel: int | tuple[int, int], *, stride: int = 1, padding: int | tuple[int, int] = 0
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride=stride, padding=padding, bias=False),
        nn.BatchNorm2d(width, eps=0.001),  # the epsilon with which the published weights were trained
        nn.ReLU(inplace=True),
    )


def _chain(channels: int, *convolutions: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Return convolutions in a row, each given by width and kernel, that keep the size of the grid."""
    layers = []
    for width, kernel in convolutions:
        height_width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (height_width[0] // 2, height_width[1] // 2)
        layers.append(_convolution(channels, width, kernel, padding=padding))
        channels = width
    return nn.Sequential(*layers)


def _pooled(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _convolution(channels, width, 1))


def _make_block_35(channels: int, pool_width: int) -> Branches:
    """Return a block of the 35x35 grid, figure 5, with 224 + `pool_width` output channels."""
    return Branches(
        _chain(channels, (64, 1)),
        _chain(channels, (48, 1), (64, 5)),
        _chain(channels, (64, 1), (96, 3), (96, 3)),
        _pooled(channels, pool_width),
    )


def _reduce_to_17(channels: int) -> Branches:
    """Return the block from the 35x35 to the 17x17 grid (section 5), with 480 + `channels` output channels."""
    return Branches(
        _convolution(channels, 384, 3, stride=2),
        nn.Sequential(_chain(channels, (64, 1), (96, 3)), _convolution(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


def _make_block_17(width: int) -> Branches:
    """Return a block of the 17x17 grid, figure 6 with n = 7, with 768 input and output channels."""
    return Branches(
        _chain(768, (192, 1)),
        _chain(768, (width, 1), (width, (1, 7)), (192, (7, 1))),
        _chain(768, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))),
        _pooled(768, 192),
    )


def _reduce_to_8(channels: int) -> Branches:
    """Return the block from the 17x17 to the 8x8 grid, with 512 + `channels` output channels."""
    return Branches(
        nn.Sequential(_chain(channels, (192, 1)), _convolution(192, 320, 3, stride=2)),
        nn.Sequential(_chain(channels, (192, 1), (192, (1, 7)), (192, (7, 1))), _convolution(192, 192, 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


def _make_block_8(channels: int) -> Branches:
    """Return a block of the 8x8 grid, figure 7, with 2048 output channels."""

    def split(width: int) -> Branches:
        return Branches(_chain(width, (384, (1, 3))), _chain(width, (384, (3, 1))))

    return Branches(
        _chain(channels, (320, 1)),
        nn.Sequential(_chain(channels, (384, 1)), split(384)),
        nn.Sequential(_chain(channels, (448, 1), (384, 3)), split(384)),
        _pooled(channels, 192),
    )


def _make_auxiliary(channels: int, num_classes: int) -> nn.Sequential:
    """Return the auxiliary classifier, section 4, for grids from 17x17 up."""
    return nn.Sequential(
        nn.AvgPool2d(5, stride=3),
        _convolution(channels, 128, 1),
        _convolution(128, 768, 5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(768, num_classes),
    )


# In evaluation, these models return only logits, as other models do. A training loop that uses `combine_losses` and
# `main_logits` works with both kinds of output.


class LogitsWithAuxiliary(NamedTuple):
    """The output of a model in training: the logits of its main and auxiliary classifiers.

    Attributes:
        logits: `[batch, classes]`, logits of the main classifier.
        auxiliary: logits of the auxiliary classifiers, each `[batch, classes]`, ordered from input to output.
        weight: weight of each auxiliary loss; the main loss has weight 1.
    """

    logits: torch.Tensor
    auxiliary: tuple[torch.Tensor, ...]
    weight: float


def main_logits(output: torch.Tensor | LogitsWithAuxiliary) -> torch.Tensor:
    """Return the logits of the main classifier for either kind of output."""
    return output.logits if isinstance(output, LogitsWithAuxiliary) else output


def combine_losses(
    output: torch.Tensor | LogitsWithAuxiliary, loss: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the main loss plus the weighted auxiliary losses; `loss` gets logits, `[batch, classes]`."""
    total = loss(main_logits(output))
    if isinstance(output, LogitsWithAuxiliary):
        for logits in output.auxiliary:
            total = total + output.weight * loss(logits)
    return total
