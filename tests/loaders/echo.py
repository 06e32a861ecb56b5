"""A loader that hands over what it read, undecoded: for tests of what all loaders have in common."""

from collections import deque

import numpy as np

from datasvc.loaders.core.loader import Loader
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from tests.shards.written_versions import LABELLED_SCHEMA, write_version

# A shuffle of the epoch, the stored order, and a windowed shuffle in two lanes.
ORDERS = [OrderConfig(seed=1), OrderConfig(1, None), OrderConfig(1, "windowed", 2, 8)]


def write_numbers(repository, sizes):
    """Write `numbers@1`, whose split `train` has a shard of each of these sizes; samples have their number as key."""
    stops = np.cumsum(sizes).tolist()
    shards = [
        [{"key": str(number), "blob": b"", "label": number} for number in range(stop - size, stop)]
        for size, stop in zip(sizes, stops, strict=True)
    ]
    return write_version(repository, "numbers", {"train": shards}, LABELLED_SCHEMA)


def open_numbers(tmp_path_factory):
    """Return the split `train` of `numbers@1` in a new repository: 60 samples in shards of unequal sizes."""
    repository = Repository.create(str(tmp_path_factory.mktemp("numbers") / "repo"))
    write_numbers(repository, [5, 1, 9, 3, 12, 2, 8, 20])
    return open_dataset(repository, "numbers")["train"]


class _Echo:
    def __init__(self):
        self._fed = deque()

    def feed(self, batch):
        self._fed.append(batch)

    def take(self):
        return self._fed.popleft()

    def close(self):
        self._fed.clear()


class EchoLoader(Loader):
    """Hands over `SampleBatch`es.

    Args:
        samples: a split, or a mixture.
        bad: positions whose samples do not decode, in every epoch.
        others: of `Loader`.
    """

    def __init__(self, samples, *, batch_size, rank=0, world_size=1, order=None, tail="drop", bad=(), **others):
        self._bad = set(bad)
        super().__init__(
            samples,
            blob="blob",
            columns=(),
            batch_size=batch_size,
            order=order or OrderConfig(seed=1),
            training=True,
            tail=tail,
            ranks=DataRanks(rank, world_size),
            **{"prefetch": 1, **others},
        )

    def _make_decoder(self):
        return _Echo()

    def _bad_samples(self, finished):
        return [index for index, position in enumerate(finished.positions.tolist()) if position in self._bad]
