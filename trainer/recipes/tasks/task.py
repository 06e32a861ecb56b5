"""What a task knows: all that differs between learning classes of images and learning the next token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from datasvc.cache import Cache
from datasvc.loaders.core.loader import Loader
from datasvc.shards import Split


@dataclass(frozen=True)
class Examples:
    """Samples on the model's device, as many as one pass takes.

    Attributes:
        inputs: `[n, ...]`, what the model takes.
        targets: `[n, ...]`, what it is to give.
        mask: `bool[n]`, False for samples that only pad.
        extra: further arguments of the model by name, `[n, ...]` each.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def split(self, size: int) -> Iterator[Examples]:
        """Yield them `size` at a time, views; the last may have fewer."""
        for start in range(0, len(self.inputs), size):
            part = slice(start, start + size)
            extra = {name: value[part] for name, value in self.extra.items()}
            yield Examples(self.inputs[part], self.targets[part], self.mask[part], extra)


@dataclass(frozen=True)
class DataPlacement:
    """Which part of the data is this process's, and where it goes.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        device: of the batches.
        num_threads: for decoding.
    """

    rank: int
    world_size: int
    device: torch.device
    num_threads: int


class Task(Protocol):
    """See the module. One is made of the settings of a run and of the split that it trains on."""

    unit: ClassVar[str]  # what throughput counts, "images"
    default_model: ClassVar[str]
    targets_vary: ClassVar[bool]  # whether ranks may have different numbers of targets in a step

    def open_loader(
        self, split: Split, *, training: bool, batch_size: int, cache: Cache | None, place: DataPlacement
    ) -> Loader[Any]:
        """Return this rank's loader of a split."""

    def build_model(self, name: str, options: Mapping[str, Any]) -> nn.Module:
        """Return the model, freshly initialised, on the CPU."""

    def unpack(self, batch: Any, device: torch.device) -> Examples:
        """Return what a batch of the loader holds, on the device."""

    def count_targets(self, examples: Examples) -> int:
        """Return how many terms the loss of these samples sums over."""

    def sum_loss(self, model: nn.Module, examples: Examples) -> Tensor:
        """Return the loss that is minimised, summed over all targets, `float32[]`."""

    def count(self, model: nn.Module, examples: Examples) -> Tensor:
        """Return what an evaluation sums over samples that are not masked, `float64[k]` on the CPU."""

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics of an evaluation by name, from the sums of `count` over all samples."""
