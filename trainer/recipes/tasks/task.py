"""The interface of a task: loaders, model, loss and metrics, which differ between images and text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor, nn

import datasvc.trainer as hvd
from datasvc.cache import Cache
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.mixture import Mixture
from datasvc.shards import Split
from datasvc.trainer.recipes.layouts.divided_model import DividedModel
from datasvc.trainer.recipes.optimizers.precision import autocast

NO_TARGET: Final = -100
"""Label without a loss: the one that cross entropy ignores by default. The loader of token blocks sets it too."""


@dataclass(frozen=True)
class Examples:
    """Samples of one forward pass, on the model's device.

    Attributes:
        inputs: `[n, ...]`, inputs of the model.
        targets: `[n, ...]`, expected outputs.
        mask: `bool[n]`, False for padding and masked samples.
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
    """A learning task; built from the settings of a run and the samples to train on.

    Attributes:
        masks_samples: whether the run masks samples, see `Masked`; the same on all ranks.
    """

    masks_samples: bool

    unit: ClassVar[str]  # name of the samples, for throughput, such as "images"
    default_model: ClassVar[str]
    num_sums: ClassVar[int]  # number of sums that `sum_metrics` returns
    losses: list[Tensor] | None  # `sum_loss` appends the losses of the samples, `float32[n]`, if this is a list

    @property
    def targets_vary(self) -> bool:
        """Whether ranks may have different numbers of targets in a step."""

    def open_loader(
        self, split: Split | Mixture, *, training: bool, batch_size: int, cache: Cache | None, place: DataPlacement
    ) -> Loader[Any]:
        """Return this rank's loader of a split or mixture."""

    def build_model(self, name: str, options: Mapping[str, Any]) -> nn.Module:
        """Return the model, freshly initialised, on the CPU."""

    def make_example(self, block: int | None, /) -> Tensor:
        """Return the input of one sample, zeros on the meta device; `block` is the number of its tokens, if any."""

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


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device,
    precision: str,
    divided: DividedModel | None = None,
) -> dict[str, float]:
    """Return the metrics of a split, equal to the last bit on all ranks. Every rank must call this.

    Args:
        task: task that defines the metrics.
        model: model; it is in evaluation mode during the call, and in training mode afterwards.
        loader: batches, equally many on all ranks: a loader with tail="pad", which is read to the end of its epoch.
        device: device of the model.
        precision: precision of the forward pass; see the module `precision`.
        divided: what this rank has of the model; None: the whole model.
    """
    model.eval()
    totals: torch.Tensor | None = None
    for batch in loader:
        with autocast(precision, device):
            counts = _sum_metrics(task, model, task.unpack(batch, device), divided)
        # Sums, not means, because batches differ in their number of samples that are not padding.
        totals = counts if totals is None else totals + counts
    model.train()
    if divided is not None:
        divided.reshard()
    assert totals is not None, "a loader with tail='pad' has at least one step"
    # The ranks' sums are added in one all-reduce, so that all ranks compute the metrics from the same bits.
    return task.metrics(hvd.allreduce(totals, name="evaluate.totals", op=hvd.Sum))


def _sum_metrics(task: Task, model: nn.Module, examples: Examples, divided: DividedModel | None) -> torch.Tensor:
    """Return the sums of this rank: zeros if another rank with the same batch has the same outputs."""
    if divided is None:
        return task.sum_metrics(model, examples)
    if divided.split is not None:
        examples = examples.narrow_tokens(divided.split.narrow)
    if divided.pipeline is None:
        counts = task.sum_metrics(model, examples)
    else:
        outputs = divided.pipeline.evaluate(examples.inputs, examples.extra)
        if outputs is not None:
            counts = task.sum_metrics(take_outputs, replace(examples, inputs=outputs, extra={}))
    return counts if divided.reports_outputs else torch.zeros(task.num_sums, dtype=torch.float64, device="cpu")
