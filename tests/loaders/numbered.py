"""Splits of samples that say their number in every column, and a loader that gives these."""

import numpy as np

from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards.versions.dataset import Split
from tests.shards.written_versions import LABELLED_SCHEMA, write_table

SIZES = {"big": [9, 4, 11, 2, 14], "middle": [5, 6, 1], "tiny": [2]}
FIRST = {"big": 100, "middle": 200, "tiny": 300}


def sample_of(number, schema):
    """Return a sample that says its number in every column of a schema."""
    values = {"key": str(number), "blob": str(number).encode(), "label": number}
    return {name: values[name] for name in schema.names}


def write_split(repository, name, sizes, first, schema=LABELLED_SCHEMA, classes=()):
    """Return a split whose samples are numbered from `first`, in every column of theirs alike."""
    stops = (np.cumsum(sizes) + first).tolist()
    shards = [
        [sample_of(number, schema) for number in range(stop - size, stop)]
        for size, stop in zip(sizes, stops, strict=True)
    ]
    table = write_table(repository.objects, shards, schema, classes)
    return Split("train", f"{name}@1", repository, repository.objects.put(table.encode()).digest)


def make_splits(folder):
    """Return splits by name, in a new repository below a folder."""
    repository = Repository.create(str(folder / "repo"))
    return {name: write_split(repository, name, sizes, FIRST[name]) for name, sizes in SIZES.items()}


def mix(splits, weights=(5, 3, 2), **options):
    """Return a mixture of them in small blocks."""
    return Mixture(list(zip(splits.values(), weights, strict=True)), **{"block": 10, **options})


class Copies:
    """A decoder that copies what it is fed."""

    def __init__(self):
        self._fed = []

    def feed(self, batch):
        self._fed.append(batch)

    def take(self):
        batch = self._fed.pop(0)
        assert batch.blobs == [] or [int(view.tobytes()) for view in batch.blobs] == batch.columns["label"].tolist()
        return batch, batch.columns["label"].tolist()

    def close(self):
        self._fed.clear()


class Numbers(Loader):
    """Gives each sample batch with the numbers of its samples."""

    def __init__(self, samples, batch_size, *, rank=0, world_size=1, order=None, **options):
        super().__init__(
            samples,
            **{"blob": "blob", "columns": ("label",), "tail": "short", **options},
            batch_size=batch_size,
            training=True,
            order=order or OrderConfig(seed=7),
            ranks=DataRanks(rank, world_size),
        )

    def _make_decoder(self):
        return Copies()
