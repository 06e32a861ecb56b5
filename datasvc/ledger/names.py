"""The names of samples that an audit found, from the repository that holds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datasvc.errors import ConfigError
from datasvc.ledger.file import Header
from datasvc.order import AccessOrder, OrderState
from datasvc.repository import Repository
from datasvc.shards.versions.dataset import Split, open_dataset
from datasvc.shards.versions.keys import SplitKeys


class SampleNames:
    """Names the samples at positions of a run.

    Args:
        repository: that holds what was read.
        header: of a file of the ledger.

    Raises:
        ConfigError: the run mixed data sets; or the repository's version is not the one that was read.
        NotFoundError: the repository has no such version.
        CorruptDataError, UnavailableError: it cannot be read.
    """

    def __init__(self, repository: Repository, header: Header) -> None:
        try:
            state = OrderState.from_dict({**header.order, "epoch": 0, "position": 0})
        except ConfigError as error:
            raise ConfigError(
                f"{header.source} is no single split, so positions have no keys in one; leave --repo out"
            ) from error
        self._config = state.config
        self._split = _open_split(repository, header.source)
        if self._split.digest != state.version:
            raise ConfigError(
                f"{header.source} in {repository.url} has shard table {self._split.digest[:12]}..., the run read "
                f"{state.version[:12]}...; give the repository that the run read"
            )
        self._keys = SplitKeys(repository.objects, self._split.table)

    def keys(self, epoch: int, positions: Sequence[int]) -> list[str]:
        """Return the keys of the samples at some positions of an epoch, in their order.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the repository cannot be read.
        """
        order = AccessOrder(self._split.table.samples_per_shard, self._config, epoch)
        shards, rows = order.locate(np.asarray(positions, np.int64))
        keys = {shard: self._keys.read(shard).keys for shard in np.unique(shards).tolist()}
        return [keys[shard][row].as_py() for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]


def _open_split(repository: Repository, source: str) -> Split:
    ref, _, split = source.rpartition("/")
    return open_dataset(repository, ref)[split]
