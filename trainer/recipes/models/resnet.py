"""Residual networks (He et al. 2016, "Deep Residual Learning for Image Recognition", arXiv:1512.03385).

Bottleneck blocks are those of "v1.5": the stride is in the 3x3 convolution. The paper has the stride in the first 1x1
convolution, which then ignores three of four positions. Goyal et al. 2017 (arXiv:1706.02677) train v1.5 too. The
number of parameters is the same as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from datasvc.trainer.recipes.models.convolutional import initialise, require_image_size

_WIDTHS = (64, 128, 256, 512)


class ResidualBlock(nn.Module):
    """`relu(shortcut(x) + branch(x))`; the branch ends with batch normalisation.

    Args:
        channels: channels of the input.
        width: channels of the inner convolutions. The output has `expansion` times as many.
        stride: ratio of input to output resolution.
    """

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        self.branch = self._make_branch(channels, width, stride)
        out = width * self.expansion
        # Option B of the paper: a projection only where the shapes differ.
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output; its height and width are those of `x`, divided by `stride` and rounded up."""
        y: torch.Tensor = self.branch(x)
        y = y + self.shortcut(x)
        return self.relu(y)  # type: ignore[no-any-return]

    def zero_initialise(self) -> None:
        """Initialise the branch to return 0, so that the block starts as its shortcut."""
        last = self.branch[-1]
        assert isinstance(last, nn.BatchNorm2d)
        nn.init.zeros_(last.weight)

    def _make_branch(self, channels: int, width: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )


class BottleneckBlock(ResidualBlock):
    """A residual block of 1x1, 3x3 and 1x1 convolutions; the output has four times the inner channels."""

    expansion: ClassVar[int] = 4

    def _make_branch(self, channels: int, width: int, stride: int) -> nn.Sequential:
        out = width * self.expansion
        return nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, the mean over all positions, and a linear classifier.

    Args:
        block: class of the residual blocks.
        depths: number of blocks of each stage.
        num_classes: number of classes.
        zero_init_residual: whether gamma of the last batch normalisation of each branch starts at 0, which makes
            training with large batches more stable at the start (Goyal et al., section 5.1).
        small_input: whether the stem is for images of about 32x32: one 3x3 convolution with stride 1 and no pooling,
            as in section 4.2 of the paper. The stages are still those for ImageNet.
    """

    def __init__(
        self,
        block: type[ResidualBlock],
        depths: Sequence[int],
        num_classes: int,
        *,
        zero_init_residual: bool = True,
        small_input: bool = False,
    ) -> None:
        super().__init__()
        self.stem = _make_stem(small_input=small_input)
        stages = []
        channels = _WIDTHS[0]
        for index, (width, depth) in enumerate(zip(_WIDTHS, depths, strict=True)):
            blocks = []
            for position in range(depth):
                # The first block of each stage halves the resolution, except in the first stage.
                is_halving = index > 0 and position == 0
                blocks.append(block(channels, width, stride=2 if is_halving else 1))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        initialise(self)
        if zero_init_residual:
            for module in self.modules():
                if isinstance(module, ResidualBlock):
                    module.zero_initialise()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, `[batch, classes]`, of images `[batch, 3, height, width]` of any size."""
        require_image_size(images, 1, "a ResNet")
        x = self.pool(self.stages(self.stem(images)))
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]


def _make_stem(*, small_input: bool) -> nn.Sequential:
    width = _WIDTHS[0]
    if small_input:
        return nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
    return nn.Sequential(
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
