"""Objects with numbers of the shards of a view, such as weights: up to 64 MB for some consecutive shards.

Each shard has an array of integers below 2**32. An object is read when one of its shards is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import pyarrow as pa
import zstandard

from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, Objects
from datasvc.shards.format.ipc_reader import decode_table, encode_table
from datasvc.shards.format.view_table import WeightPack

PACKS_FORMAT: Final = 1
_PACK_BYTES: Final = 64_000_000
_MAX_PACKS: Final = 8  # compressed objects in memory

Kind = Literal["weights", "packs", "aspects"]


class PackWriter:
    """Stores numbers of a table's shards, which are added in table order; for `kind`, see `PackReader`."""

    def __init__(self, objects: Objects, kind: Kind) -> None:
        self._objects, self._kind = objects, kind
        self._shards: list[int] = []
        self._contents: list[bytes] = []
        self._packs: list[WeightPack] = []
        self._num_shards = self._num_bytes = 0

    def add(self, values: Integers) -> None:
        """Add the numbers of the next shard: `int64[n]` in range(2**32), such as the weights of its live samples."""
        self._shards.append(self._num_shards)
        self._contents.append(zstandard.compress(values.astype("<u4").tobytes()))
        self._num_shards += 1
        self._num_bytes += len(self._contents[-1])
        if self._num_bytes >= _PACK_BYTES:
            self._flush()

    def finish(self) -> tuple[WeightPack, ...]:
        """Return the objects of all shards."""
        if self._shards:
            self._flush()
        return tuple(self._packs)

    def _flush(self) -> None:
        pack = encode_table(pa.table([self._shards, self._contents], schema=_schema(self._kind)))
        self._packs.append(WeightPack(self._shards[0], self._objects.put(pack).digest))
        self._shards, self._contents, self._num_bytes = [], [], 0


class PackReader:
    """Reads what a `PackWriter` has stored. Safe for use by several threads.

    Args:
        objects: objects of the repository.
        packs: the stored objects, by ascending shard.
        kind: what the numbers are; the name of their column.
    """

    def __init__(self, objects: Objects, packs: Sequence[WeightPack], kind: Kind) -> None:
        self._objects, self._packs, self._kind = objects, packs, kind
        self._firsts = np.array([pack.first_shard for pack in packs], np.int64)
        self._tables: OrderedDict[Digest, pa.Table] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def read(self, shard: int, *, max_values: int) -> Integers:
        """Return the numbers of a shard: `int64[n]`, n <= max_values.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the object cannot be read.
        """
        pack = self._find(shard)
        table = self._read_table(pack)
        try:
            content = table.column(self._kind)[shard - pack.first_shard].as_py()
            raw = zstandard.decompress(content, max_output_size=4 * max_values)
            return np.frombuffer(raw, "<u4").astype(np.int64)
        except (zstandard.ZstdError, IndexError, ValueError) as error:
            raise self.corrupt(shard, str(error)) from error

    def corrupt(self, shard: int, problem: str) -> CorruptDataError:
        """Return the error of an object that does not fit its table."""
        location = self._objects.location(self._find(shard).digest)
        return CorruptDataError(f"{location} does not have the {self._kind} of its table: {problem}")

    def _find(self, shard: int) -> WeightPack:
        return self._packs[int(np.searchsorted(self._firsts, shard, side="right")) - 1]

    def _read_table(self, pack: WeightPack) -> pa.Table:
        with self._lock:
            if pack.digest in self._tables:
                self._tables.move_to_end(pack.digest)
                return self._tables[pack.digest]
        name = self._objects.location(pack.digest)
        what = "pack of weights" if self._kind == "weights" else f"object of {self._kind}"
        table = decode_table(
            self._objects.read(pack.digest),
            name,
            what=what,
            format_key=_format_key(self._kind),
            latest=PACKS_FORMAT,
            columns=_schema(self._kind),
        )
        with self._lock:
            self._tables[pack.digest] = table
            while len(self._tables) > _MAX_PACKS:
                self._tables.popitem(last=False)
        return table


def _format_key(kind: Kind) -> bytes:
    return f"datasvc.{kind}.format".encode()


def _schema(kind: Kind) -> pa.Schema:
    fields = [pa.field("shard", pa.int64(), nullable=False), pa.field(kind, pa.large_binary(), nullable=False)]
    return pa.schema(fields, metadata={_format_key(kind): str(PACKS_FORMAT).encode()})
