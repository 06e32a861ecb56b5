"""AlexNet, in the variant of Krizhevsky 2014 ("One weird trick for parallelizing convolutional neural networks").

The widths are those of torchvision's model: one tower with 64, 192, 384, 256 and 256 filters, without local response
normalisation. Krizhevsky et al. 2012 have two towers with 96, 256, 384, 384 and 256 filters.
"""

from __future__ import annotations

import torch
from torch import nn

from datasvc.trainer.recipes.models.convolutional import initialise, require_image_size

_MIN_SIZE = 63  # with 62 pixels, the input of the last 3x3 pooling would be only 2x2


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
        require_image_size(images, _MIN_SIZE, "AlexNet")
        x = self.pool(self.features(images))
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]
