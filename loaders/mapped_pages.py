"""Keeps the mapped pages of a loader few: a shard that is read here and there is soon mapped from end to end.

The kernel maps a whole folio, up to 2 MiB, where a sample of 100 kB is touched. These pages are the page cache's and
cost nobody memory, but they count as the process's own in its resident and proportional set, for whoever limits it by
these. To map them again takes microseconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

from datasvc.shards import Shard

_SAMPLES_BETWEEN: Final = 64


class MappedPages:
    """Unmaps the pages of shards after every so many samples that were read of them."""

    def __init__(self) -> None:
        # Weak: a loader that pauses must not keep a shard mapped that it has released, and the cache evicted.
        self._shards: weakref.WeakSet[Shard] = weakref.WeakSet()
        self._num_samples = 0

    def read(self, shards: Iterable[Shard], num_samples: int) -> None:
        """Say that samples of shards are read from now on; those of earlier calls are mapped no longer."""
        if self._num_samples >= _SAMPLES_BETWEEN:
            for shard in self._shards:
                shard.unmap_pages()
            self.clear()
        self._shards.update(shards)
        self._num_samples += num_samples

    def clear(self) -> None:
        """Forget the shards."""
        self._shards.clear()
        self._num_samples = 0
