"""Finds the positions of an epoch that a run masked, so that `trained-on` does not count the samples at them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.ledger.masked import Masked, masks_of
from datasvc.models.provenance.consumed_ranges import ReadOrder
from datasvc.models.provenance.key_lookup import KeyPositions, Served, concatenate, places_of_rows
from datasvc.models.provenance.segments import Consumed
from datasvc.repository import Digest, Objects
from datasvc.shards.format.shard_table import ShardTable


class MaskedUses:
    """The masked positions of the orders of some data uses; each epoch is computed once.

    Args:
        objects: objects of the repository.
        tables: shard tables by digest; None for a table that is not in the repository.
    """

    def __init__(self, objects: Objects, tables: Mapping[Digest, ShardTable | None]) -> None:
        self._objects = objects
        self._tables = {digest: table for digest, table in tables.items() if table is not None}
        self._found: dict[tuple[ReadOrder, Masked, int], Integers] = {}

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
            is_masked |= np.isin(served.positions, self._positions(consumed.segment.order, masked, epoch))
        return served[np.flatnonzero(~is_masked)]

    def _positions(self, order: ReadOrder, masked: Masked, epoch: int) -> Integers:
        """Return the positions of an epoch at which an order serves masked samples."""
        if (order, masked, epoch) not in self._found:
            found = []
            for since in {item.since for item in masked.samples if item.since[0] <= epoch}:
                rows: dict[str, dict[int, Integers]] = {}
                for item in masked.samples:
                    if item.since == since:
                        rows.setdefault(item.table, {})[item.shard] = np.array(item.rows, np.int64)
                positions = self._positions_of(order, rows, epoch)
                found.append(positions[positions >= since[1]] if since[0] == epoch else positions)
            self._found[order, masked, epoch] = concatenate(found)
        return self._found[order, masked, epoch]

    def _positions_of(self, order: ReadOrder, rows: Mapping[str, Mapping[int, Integers]], epoch: int) -> Integers:
        places = {}
        for source, digest in enumerate(order.tables):
            if digest in rows:
                try:
                    places[source] = places_of_rows(self._objects, self._tables[digest], rows[digest])
                except NotFoundError:
                    continue  # without the deletions, `find_places` does not find the samples of this split either
        return KeyPositions(order, self._tables, places, self._objects).find(epoch).positions
