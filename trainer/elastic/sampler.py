"""A sampler and a loader that continue their epoch when the number of ranks changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import Sampler

from datasvc.trainer.job import runtime

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


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


# Training functions put the wrapper into a `TorchState`, which calls `reset` in each new round: a period in which the
# ranks of the job and their numbers do not change.


class ResumableLoader(Protocol[B_co]):
    """The interface that `ElasticLoader` requires; the loaders of `datasvc.loaders` and torchdata have it."""

    def __iter__(self) -> Iterator[B_co]:
        """Yield the remaining batches of the epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job after the batches delivered so far; it is the same on every rank."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue from a state, which may have been saved at another rank and size."""


class ElasticLoader(Generic[B]):
    """A wrapper of a loader for the current rank and size. Attributes not defined here are those of the loader.

    Its state is the position of the whole job, not of one rank. So after a change of size, the ranks together deliver
    each remaining sample exactly once. Create a new iterator in every call of the training function. Put the wrapper
    into a `TorchState`, which calls `reset` in each new round.

    Args:
        make_loader: factory, called as `make_loader(rank, size)` in each round. Loaders of `datasvc.loaders` take
            `ranks=DataRanks(rank, size)`. To keep the global batch size constant, divide it by `size` to get the
            batch size of the loader.
    """

    def __init__(self, make_loader: Callable[[int, int], ResumableLoader[B]]) -> None:
        self._make_loader = make_loader
        self._made_for: tuple[int, int, int] | None = None  # number of the `init`, rank, size
        self._loader: ResumableLoader[B] | None = None
        self._state: dict[str, Any] | None = None  # position of the job while there is no loader
        self.reset()

    @property
    def loader(self) -> ResumableLoader[B]:
        """The loader of the current round."""
        assert self._loader is not None
        return self._loader

    def reset(self) -> None:
        """In a new round, create a new loader at the same position of the job.

        Raises:
            HorovodInternalError: a rank was lost while the loader was made; call this again in the next round.
        """
        # Also if rank and size stay: the loaders of a round agree on values, and those of new ranks wait for all.
        made_for = (runtime.num_inits(), runtime.rank(), runtime.size())
        if made_for == self._made_for:
            return
        if self._loader is not None:
            self._state = self._loader.state_dict()
            self.close()
            # Keep only the position, because `_make_loader` fails if another rank is lost at that time.
            self._loader = self._made_for = None
        loader = self._make_loader(runtime.rank(), runtime.size())
        # The state is the position of the job, so it is valid for another rank and size.
        if self._state is not None:
            loader.load_state_dict(self._state)
        self._loader, self._made_for, self._state = loader, made_for, None

    def __iter__(self) -> Iterator[B]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError if the loader has no length

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job."""
        return self.loader.state_dict() if self._state is None else copy.deepcopy(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state."""
        copied = copy.deepcopy(dict(state))
        if self._loader is None:
            self._state = copied
        else:
            self._loader.load_state_dict(copied)

    def close(self) -> None:
        """Close the loader, if it has a `close` method."""
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()

    def __getattr__(self, name: str) -> Any:
        # Reject names with an underscore: before `_loader` is set, a lookup of it would call this method endlessly.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
