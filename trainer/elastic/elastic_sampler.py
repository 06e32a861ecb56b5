"""A sampler whose epoch goes on when the number of ranks changes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from datasvc.trainer.job import runtime


class ElasticSampler(Sampler[int]):
    """Deals the samples of an epoch to the ranks; after a reset, those that are left.

    Samples count as processed when they are recorded, which belongs before `commit`: `record_batch` where all
    ranks take batches of one size, `record_indices` where they do not. If the ranks do not divide what is left,
    some samples come twice, as in Horovod; `ElasticLoader` with one of our loaders has no such tail.

    Args:
        dataset: only its length matters.
        shuffle: whether the order is `random.Random(seed + epoch)`'s, else that of the data set.
        seed: the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing of it is processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's signature
        """Every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """These samples are processed, whoever had them; every rank records all ranks' alike."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch, counted from the last reset."""
        start = batch_idx * batch_size
        return self._share()[start : start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """What is processed: of the job, not of this rank."""
        state: dict[str, Any] = {"epoch": self.epoch, "processed_num": self.processed_num}
        if self.processed_indices:
            state["processed_indices"] = sorted(self.processed_indices)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from there, with this rank's share of what is left."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Deals what is left of the epoch to the ranks that there are now."""
        self.num_replicas = runtime.size()
        self.rank = runtime.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            # Horovod's order, so that a run which began there goes on alike.
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311 - not for secrets
        left = order[self.processed_num :]
        self.remaining_indices = [index for index in left if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self._share())

    def __len__(self) -> int:
        return self.num_samples

    def _share(self) -> list[int]:
        left = self.remaining_indices
        if not left:
            return []
        repeats = -(-self.total_size // len(left))
        return (left * repeats)[: self.total_size][self.rank :: self.num_replicas]
