"""The interface of a task: loaders, model, loss and metrics, which differ between images and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor, nn

from datasvc.cache import Cache
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.mixture import Mixture
from datasvc.shards import Split

NO_TARGET: Final = -100
"""Label without a loss: the one that cross entropy ignores by default. The loader of token blocks sets it too."""


@dataclass(frozen=True)
class Examples:
    """Samples of one forward pass, on the model's device.

    Attributes:
        inputs: `[n, ...]`, inputs of the model.
        targets: `[n, ...]`, expected outputs.
        mask: `bool[n]`, False for padding.
        extra: further arguments of the model by name, `[n, ...]` each.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def split(self, size: int) -> Iterator[Examples]:
        """Yield parts of `size` samples, as views; the last may be smaller."""
        for start in range(0, len(self.inputs), size):
            part = slice(start, start + size)
            extra = {name: value[part] for name, value in self.extra.items()}
            yield Examples(self.inputs[part], self.targets[part], self.mask[part], extra)

    def narrow_tokens(self, narrow: Callable[[Tensor], Tensor]) -> Examples:
        """Return the part of each block that a rank computes.

        Args:
            narrow: function that takes the part of `[n, block, ...]`.

        Returns:
            The part of inputs, targets and `position_ids`; `document_ids` stay those of the whole block, because
            attention needs them.
        """
        extra = {name: narrow(value) if name == "position_ids" else value for name, value in self.extra.items()}
        return replace(self, inputs=narrow(self.inputs), targets=narrow(self.targets), extra=extra)


def take_outputs(outputs: Tensor) -> Tensor:
    """Return the outputs of a model: in place of the model, if its outputs are given as inputs."""
    return outputs


@dataclass(frozen=True)
class DataPlacement:
    """The data rank of this process, the device of its batches, and its number of decoding threads."""

    rank: int
    world_size: int
    device: torch.device
    num_threads: int


class Task(Protocol):
    """A learning task; built from the settings of a run and the samples to train on."""

    unit: ClassVar[str]  # name of the samples, for throughput, such as "images"
    default_model: ClassVar[str]
    num_sums: ClassVar[int]  # number of sums that `sum_metrics` returns

    @property
    def targets_vary(self) -> bool:
        """Whether ranks may have different numbers of targets in a step."""

    def open_loader(
        self, split: Split | Mixture, *, training: bool, batch_size: int, cache: Cache | None, place: DataPlacement
    ) -> Loader[Any]:
        """Return this rank's loader of a split or mixture."""

    def build_model(self, name: str, options: Mapping[str, Any]) -> nn.Module:
        """Return the model, freshly initialised, on the CPU."""

    def unpack(self, batch: Any, device: torch.device) -> Examples:
        """Return the samples of a loader's batch, on the device."""

    def count_targets(self, examples: Examples) -> int:
        """Return the number of terms in the loss of these samples."""

    def sum_loss(self, model: Callable[..., Any], examples: Examples) -> Tensor:
        """Return the loss, summed over all targets: `float32[]`."""

    def sum_metrics(self, model: Callable[..., Any], examples: Examples) -> Tensor:
        """Return the sums that `metrics` needs, over the samples that are not padding: `float64[k]` on the CPU."""

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics of an evaluation by name, from the sums of `sum_metrics` over all batches and ranks."""
