"""Finds the positions of an epoch that a run masked, so that `trained-on` does not count the samples at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.ledger.masked import Masked, masks_of
from datasvc.models.provenance.consumed_ranges import ReadOrder
from datasvc.models.provenance.key_lookup import KeyPositions, Served, places_of_rows
from datasvc.models.provenance.segments import Consumed
from datasvc.repository import Digest, Objects
from datasvc.shards.format.shard_table import ShardTable

_PAIR: Final = np.dtype([("position", np.int64), ("place", np.int64)])


class MaskedUses:
    """The masked positions of the orders of some data uses; each epoch is computed once.

    Args:
        objects: objects of the repository.
        tables: shard tables by digest; None for a table that is not in the repository.
    """

    def __init__(self, objects: Objects, tables: Mapping[Digest, ShardTable | None]) -> None:
        self._objects = objects
        self._tables = {digest: table for digest, table in tables.items() if table is not None}
        self._found: dict[tuple[ReadOrder, Masked, int], npt.NDArray[Any]] = {}

    def drop(self, consumed: Consumed, epoch: int, served: Served) -> Served:
        """Return the samples of `served` that the run did not mask.

        Raises:
            ConfigError: the masks of the data use are not valid.
        """
        masked = masks_of(consumed.use.state)
        if not masked or not len(served.positions):
            return served
        is_masked = masked.at(epoch, served.positions)
        if masked.samples:
            uses = self._uses(consumed.segment.order, masked, epoch)
            # Comparing pairs takes a hundred times as long as comparing numbers.
            chosen = np.flatnonzero(np.isin(served.positions, uses["position"]))
            is_masked[chosen] |= np.isin(_pairs(served[chosen]), uses)
        return served[np.flatnonzero(~is_masked)]

    def _uses(self, order: ReadOrder, masked: Masked, epoch: int) -> npt.NDArray[Any]:
        """Return the pairs of an epoch that serve masked samples, see `_pairs`."""
        if (order, masked, epoch) not in self._found:
            found = []
            for since in {item.since for item in masked.samples if item.since[0] <= epoch}:
                rows: dict[str, dict[int, Integers]] = {}
                for item in masked.samples:
                    if item.since == since:
                        rows.setdefault(item.table, {})[item.shard] = np.array(item.rows, np.int64)
                served = self._served(order, rows, epoch)
                if since[0] == epoch:
                    served = served[np.flatnonzero(served.positions >= since[1])]
                found.append(_pairs(served))
            self._found[order, masked, epoch] = np.concatenate([np.empty(0, _PAIR), *found])
        return self._found[order, masked, epoch]

    def _served(self, order: ReadOrder, rows: Mapping[str, Mapping[int, Integers]], epoch: int) -> Served:
        places = {}
        for source, digest in enumerate(order.tables):
            if digest in rows:
                try:
                    places[source] = places_of_rows(self._objects, self._tables[digest], rows[digest])
                except NotFoundError:
                    continue  # without the deletions, `find_places` does not find the samples of this split either
        return KeyPositions(order, self._tables, places, self._objects).find(epoch)


def _pairs(served: Served) -> npt.NDArray[Any]:
    """Return position and sample of each use: of a pack, the run may have masked one document and not another."""
    pairs = np.empty(len(served.positions), _PAIR)
    pairs["position"], pairs["place"] = served.positions, served.places
    return pairs
