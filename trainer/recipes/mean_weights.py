"""The weights that a run with `--sync` evaluates and saves as its model: the mean, or those of the best replica.

Between two rounds, the weights of the replicas differ. A replica is one rank, or several that divide the
model. Invariant: nothing here changes the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import datasvc.trainer as hvd
from datasvc.trainer.recipes.layouts.shard import to_local
from datasvc.trainer.recipes.tasks.batch_statistics import batch_statistics
from datasvc.trainer.recipes.update import Learner


@torch.no_grad()
def compute_mean_weights(run: Learner) -> dict[str, Tensor]:
    """Return copies of the means over the replicas, keyed as in `state_dict()`; {} if these have equal weights.

    Of a divided model, a rank returns the parts that it has. Only trainable weights have a mean, because only these
    differ. With a tournament, they are the weights of the winner of a comparison of all ranks, and its batch
    statistics. Every rank must call this.
    """
    if not run.config.averages_weights or run.optimizer.is_averaged or hvd.size() == 1:
        return {}
    if run.optimizer.tournament is not None:
        with run.optimizer.outer_weights():
            return _changed_tensors(run)
    weights = {weight: name for name, weight in run.model.named_parameters() if weight.requires_grad}
    means = {weight: weight.detach().clone() for weight in weights}
    place_set = run.divided.place_set if run.divided is not None else None
    hvd.grouped_allreduce_(
        [to_local(mean) for mean in means.values()],
        name="mean_weights",
        op=hvd.Average,
        process_set=place_set or hvd.global_process_set,
    )
    # Tied weights have several names.
    named = run.model.named_parameters(remove_duplicate=False)
    return {name: means[weight] for name, weight in named if weight in means}


@contextmanager
def using_mean_weights(run: Learner) -> Iterator[None]:
    """Exchange the weights for their means inside the context; do not train inside it. Every rank must call this."""
    means = compute_mean_weights(run)
    own = _changed_tensors(run) if means else {}
    run.model.load_state_dict(means, strict=False)
    try:
        yield
    finally:
        if run.divided is not None:
            run.divided.reshard()
        run.model.load_state_dict(own, strict=False)


def own_weights(run: Learner) -> dict[str, Tensor]:
    """Return copies of the trainable weights of this rank by name."""
    return {name: weight.detach().clone() for name, weight in run.model.named_parameters() if weight.requires_grad}


def _changed_tensors(run: Learner) -> dict[str, Tensor]:
    """Return copies of what `compute_mean_weights` replaces, by name; a tied weight has several."""
    named = run.model.named_parameters(remove_duplicate=False)
    tensors: dict[str, Tensor] = {name: weight for name, weight in named if weight.requires_grad}
    if run.optimizer.tournament is not None:
        tensors |= batch_statistics(run.model)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
