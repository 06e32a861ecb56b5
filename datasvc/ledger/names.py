"""Looks up the sample keys at positions of a run, so that `datasvc audit --repo` can list samples by key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datasvc.errors import ConfigError
from datasvc.ledger.file import Header
from datasvc.order import AccessOrder, OrderState
from datasvc.repository import Repository
from datasvc.shards.versions.dataset import read_version
from datasvc.shards.versions.keys import SplitKeys


class SampleNames:
    """Lookup of the names of samples, that is, of their keys, at positions of a run.

    Args:
        repository: repository with the data that the run read.
        header: header of a ledger file of the run; it identifies the data and the access order.

    Raises:
        ConfigError: the run read a mixture; or the version in the repository is not the one that the run read.
        NotFoundError: the version does not exist.
        CorruptDataError, UnavailableError: the version cannot be read.
    """

    def __init__(self, repository: Repository, header: Header) -> None:
        try:
            # Only the parameters of the order are needed. The header lacks an epoch and a position: set them to 0.
            state = OrderState.from_dict({**header.order, "epoch": 0, "position": 0})
        except ConfigError as error:
            # The state of a mixture has other fields.
            raise ConfigError(
                f"{header.source} is not a single split, so positions have no keys; leave out --repo"
            ) from error
        self._config = state.config
        ref, _, split = header.source.rpartition("/")  # such as "pets@3/train"
        # A version that was removed since, also by a rename, keeps its shard tables and sample indexes.
        self._split = read_version(repository, repository.resolve("datasets", ref, removed=True))[split]
        # A data set of the same name in another repository may have other samples, so compare the shard tables.
        if self._split.digest != state.version:
            raise ConfigError(
                f"{header.source} in {repository.url} has shard table {self._split.digest[:12]}..., the run read "
                f"{state.version[:12]}...; give the repository that the run read"
            )
        self._keys = SplitKeys(repository.objects, self._split.table)

    def keys(self, epoch: int, positions: Sequence[int]) -> list[str]:
        """Return the keys of the samples at positions of an epoch, in the given order.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the repository cannot be read.
        """
        order = AccessOrder(self._split.table.samples_per_shard, self._config, epoch)
        shards, rows = order.locate(np.asarray(positions, np.int64))
        # Read the sample index of each shard once, even if several positions are in the shard.
        keys = {shard: self._keys.read(shard).keys for shard in np.unique(shards).tolist()}
        return [keys[shard][row].as_py() for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]
