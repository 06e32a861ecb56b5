"""GoogLeNet (Szegedy et al. 2015, "Going Deeper with Convolutions", arXiv:1409.4842) with batch normalisation.

This is the variant with published weights for torch (torchvision, converted from TensorFlow). It has batch
normalisation after each convolution (Ioffe and Szegedy 2015, arXiv:1502.03167) instead of biases and local response
normalisation, and 3x3 convolutions in the third branch, where the paper has 5x5 (`kernel=5`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import nn

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models.convolutional import initialise, require_image_size
from datasvc.trainer.recipes.models.inception import LogitsWithAuxiliary

_MIN_SIZE: Final = 15  # with 14 pixels, the output of the third pooling would be empty
_AUXILIARY_WEIGHT: Final = 0.3  # section 5
_AUXILIARY_DROPOUT: Final = 0.7  # section 5


class _Widths(NamedTuple):
    """Number of filters in each part of an inception block; the fields are the columns of table 1 of the paper."""

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    pool: int

    @property
    def out(self) -> int:
        return self.one + self.three + self.five + self.pool


# Table 1: inception 3a to 5b, with a pooling between the stages.
_STAGE_3: Final = (_Widths(64, 96, 128, 16, 32, 32), _Widths(128, 128, 192, 32, 96, 64))
_STAGE_4: Final = (
    _Widths(192, 96, 208, 16, 48, 64),
    _Widths(160, 112, 224, 24, 64, 64),
    _Widths(128, 128, 256, 24, 64, 64),
    _Widths(112, 144, 288, 32, 64, 64),
    _Widths(256, 160, 320, 32, 128, 128),
)
_STAGE_5: Final = (_Widths(256, 160, 320, 32, 128, 128), _Widths(384, 192, 384, 48, 128, 128))


class GoogLeNet(nn.Module):
    """Nine inception blocks, the mean over all positions, and a linear classifier.

    At 1000 classes it has 13,004,888 parameters, 6,624,904 without auxiliary classifiers.
    In evaluation, or without auxiliary classifiers, the output is the logits. In training with auxiliary
    classifiers it is `LogitsWithAuxiliary`; `combine_losses` adds their losses with the weight 0.3 of the paper.

    Args:
        num_classes: number of classes.
        auxiliary: whether the model has two auxiliary classifiers, on the first and fourth block of stage 4.
        dropout: probability of dropout before the classifier (section 5). The auxiliary classifiers always have 0.7.
        kernel: side of the convolutions of the third branch, 3 or 5.

    Raises:
        ConfigError: `kernel` is neither 3 nor 5.
    """

    def __init__(self, num_classes: int, *, auxiliary: bool = True, dropout: float = 0.4, kernel: int = 3) -> None:
        super().__init__()
        if kernel not in (3, 5):
            raise ConfigError(f"kernel is {kernel}; expected 3, as in the published weights, or 5, as in the paper")
        self.stem = nn.Sequential(
            _convolution(3, 64, 7, stride=2),
            _pool_half(3),
            _convolution(64, 64, 1),
            _convolution(64, 192, 3),
            _pool_half(3),
        )
        stage_3, channels = _make_blocks(192, _STAGE_3, kernel)
        self.stage_3 = nn.Sequential(*stage_3, _pool_half(3))
        # Stage 4 is three modules, because the auxiliary classifiers read between its blocks.
        self.stage_4a, channels_4a = _make_blocks(channels, _STAGE_4[:1], kernel)
        self.stage_4b, channels_4b = _make_blocks(channels_4a, _STAGE_4[1:4], kernel)
        self.stage_4c, channels = _make_blocks(channels_4b, _STAGE_4[4:], kernel)
        stage_5, channels = _make_blocks(channels, _STAGE_5, kernel)
        self.stage_5 = nn.Sequential(_pool_half(2), *stage_5)
        auxiliary_inputs = (channels_4a, channels_4b) if auxiliary else ()
        self.auxiliary = nn.ModuleList(_make_auxiliary(width, num_classes) for width in auxiliary_inputs)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(channels, num_classes)
        initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor | LogitsWithAuxiliary:
        """Return logits, `[batch, classes]`, of images `[batch, 3, height, width]` from 15x15 up.

        In training with auxiliary classifiers, return `LogitsWithAuxiliary`.

        Raises:
            ConfigError: the images are smaller.
        """
        require_image_size(images, _MIN_SIZE, "GoogLeNet")
        first = self.stage_4a(self.stage_3(self.stem(images)))
        second = self.stage_4b(first)
        x = self.pool(self.stage_5(self.stage_4c(second)))
        logits: torch.Tensor = self.classifier(self.dropout(x.flatten(1)))
        if not (self.training and len(self.auxiliary)):
            return logits
        auxiliary = tuple(
            classifier(features) for classifier, features in zip(self.auxiliary, (first, second), strict=True)
        )
        return LogitsWithAuxiliary(logits, auxiliary, _AUXILIARY_WEIGHT)


class Inception(nn.Module):
    """Inception block: four branches over the same input, concatenated along the channels.

    Args:
        channels: channels of the input.
        widths: number of filters of each convolution.
        kernel: side of the convolution of the third branch, `five`.
    """

    def __init__(self, channels: int, widths: _Widths, kernel: int) -> None:
        super().__init__()
        self.one = _convolution(channels, widths.one, 1)
        self.three = nn.Sequential(
            _convolution(channels, widths.three_reduce, 1), _convolution(widths.three_reduce, widths.three, 3)
        )
        self.five = nn.Sequential(
            _convolution(channels, widths.five_reduce, 1), _convolution(widths.five_reduce, widths.five, kernel)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _convolution(channels, widths.pool, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[batch, widths.out, height, width]` for an input `[batch, channels, height, width]`."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def _convolution(channels: int, width: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width, eps=0.001),  # the epsilon in TensorFlow, with which the published weights were trained
        nn.ReLU(inplace=True),
    )


def _pool_half(kernel: int) -> nn.MaxPool2d:
    # With ceil_mode, the poolings halve a size of 112 to 56, 28, 14 and 7 without padding.
    return nn.MaxPool2d(kernel, stride=2, ceil_mode=True)


def _make_blocks(channels: int, table: tuple[_Widths, ...], kernel: int) -> tuple[nn.Sequential, int]:
    """Return the blocks for some rows of table 1, and the number of output channels of the last block."""
    blocks = []
    for widths in table:
        blocks.append(Inception(channels, widths, kernel))
        channels = widths.out
    return nn.Sequential(*blocks), channels


def _make_auxiliary(channels: int, num_classes: int) -> nn.Sequential:
    """Return an auxiliary classifier (section 5)."""
    return nn.Sequential(
        # As large as the result of the paper's 5x5 pooling with stride 3 for images of 224x224; the windows differ.
        nn.AdaptiveAvgPool2d(4),
        _convolution(channels, 128, 1),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(inplace=True),
        nn.Dropout(_AUXILIARY_DROPOUT),
        nn.Linear(1024, num_classes),
    )
