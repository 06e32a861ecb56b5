"""A progress that tests read: what an operation began, and what it counted."""

import threading
from collections import Counter

from datasvc.progress import Progress


class RecordedProgress(Progress):
    """Records all calls; `on_begin` and `on_advance` are called without arguments before each."""

    def __init__(self, *, on_begin=lambda: None, on_advance=lambda: None):
        self.totals, self.amounts = [], []
        self.by_source, self.num_samples, self.num_shards = Counter(), 0, 0
        self._lock = threading.Lock()
        self._on_begin, self._on_advance = on_begin, on_advance

    def begin(self, total):
        self._on_begin()
        self.totals.append(total)

    def advance(self, amount, *, source="", num_samples=0, num_shards=0):
        self._on_advance()
        with self._lock:
            self.amounts.append(amount)
            self.by_source[source] += amount
            self.num_samples += num_samples
            self.num_shards += num_shards

    @property
    def total(self):
        return sum(self.amounts)
