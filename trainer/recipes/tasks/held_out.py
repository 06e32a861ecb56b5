"""The judge of a run with `--sync tournament`: the loss on a fixed slice of the validation split.

Every rank reads the same samples once, when the run starts. Invariant: a judge changes nothing that training reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders import Mixture
from datasvc.shards import Split
from datasvc.trainer.recipes.optimizers.precision import autocast
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.task import DataPlacement, Examples, Task


def read_held_out(
    config: TrainConfig,
    task: Task,
    val: Split | Mixture | None,
    *,
    batch_size: int,
    versions: Sequence[str],
    cache: Cache | None,
    place: DataPlacement,
) -> list[Examples]:
    """Return the samples on which replicas are judged, in batches: every k-th of `val`; [] without tournaments.

    k is the smallest number with which they are no more than the `samples` of the policy. Every rank reads the same.

    Args:
        config: settings of the run.
        task: task of the run.
        val: the validation split.
        batch_size: samples of a batch; the last one may be smaller.
        versions: names of the data sets, for the message.
        cache: cache of the node.
        place: device and threads of this rank.

    Raises:
        ConfigError: there is no validation split.
    """
    policy = config.parse_sync()
    if policy is None or policy.kind != "tournament":
        return []
    if val is None:
        raise ConfigError(
            f"sync is {config.sync!r}, which judges replicas on samples of the split 'val', and "
            f"{' + '.join(versions)} has none; ingest the data with one (--val-fraction), or give --sync local:8"
        )
    # The loader of one of k ranks with batches of one sample serves every k-th sample, and reads no other.
    stride = math.ceil(len(val) / policy.samples)
    first = replace(place, rank=0, world_size=stride)
    loader = task.open_loader(val, training=False, batch_size=1, cache=cache, place=first)
    with loader:
        samples = [task.unpack(batch, place.device) for batch in loader]
    return [_join(samples[start : start + batch_size]) for start in range(0, len(samples), batch_size)]


def _join(parts: Sequence[Examples]) -> Examples:
    inputs, targets, mask = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "targets", "mask")
    )
    extra = {name: torch.cat([part.extra[name] for part in parts]) for name in parts[0].extra}
    return Examples(inputs, targets, mask, extra)


def make_judge(
    config: TrainConfig, task: Task, model: nn.Module, held_out: Sequence[Examples]
) -> Callable[[], float]:
    """Return the function that computes the mean loss of the model on batches of samples on its device."""
    device = held_out[0].inputs.device

    @torch.no_grad()
    def judge() -> float:
        model.eval()
        with autocast(config.precision, device):
            totals = torch.stack([task.sum_metrics(model, examples) for examples in held_out]).sum(0)
        model.train()
        return task.metrics(totals)["val_loss"]

    return judge
