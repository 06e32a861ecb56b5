"""A sampler that continues its epoch when the number of ranks changes, as in `horovod.torch.elastic.sampler`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from datasvc.trainer.job import runtime


class ElasticSampler(Sampler[int]):
    """A sampler that distributes the samples of an epoch over the ranks; a reset redistributes the remaining samples.

    The training function records processed samples before `commit`: with `record_batch` if the batches of all ranks
    have the same size, otherwise with `record_indices`. If the number of remaining samples is not divisible by the
    number of ranks, some samples are repeated, as in Horovod; `ElasticLoader` with a loader of `datasvc.loaders`
    repeats none.

    Args:
        dataset: data set; only its length is used.
        shuffle: whether to shuffle by `random.Random(seed + epoch)`; if False, the order is that of the data set.
        seed: seed, the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # number of samples that `record_batch` has counted, from the start of the order
        self.processed_indices: set[int] = set()  # samples that `record_indices` has listed
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with no processed samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's signature
        """Record that every rank has processed a batch of this size."""
        # The ranks take samples of the order in turn, so their batches together are consecutive.
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record processed samples; every rank records the samples of all ranks."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the sample indices of one batch of this rank. Batches are counted from 0 after each reset."""
        start = batch_idx * batch_size
        return self._local_indices()[start : start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the processed samples of the whole job, not of this rank alone."""
        state: dict[str, Any] = {"epoch": self.epoch, "processed_num": self.processed_num}
        if self.processed_indices:
            state["processed_indices"] = sorted(self.processed_indices)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state, with this rank's part of the remaining samples."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining samples of the epoch over the current ranks."""
        self.num_replicas = runtime.size()
        self.rank = runtime.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            # Horovod's order, so that a run that began with Horovod continues with the same samples.
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311 - not for secrets
        remaining = order[self.processed_num :]
        self.remaining_indices = [index for index in remaining if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)  # rounded up
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self._local_indices())

    def __len__(self) -> int:
        return self.num_samples

    def _local_indices(self) -> list[int]:
        """Return this rank's part of the remaining samples, equally long on all ranks."""
        remaining = self.remaining_indices
        if not remaining:
            return []
        # Repeat samples from the beginning, up to the total size. Each rank takes every `num_replicas`-th of them.
        repeats = -(-self.total_size // len(remaining))
        return (remaining * repeats)[: self.total_size][self.rank :: self.num_replicas]
