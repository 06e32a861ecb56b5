"""The last pages that were shown, for the time in which the store does not respond."""

from __future__ import annotations

import threading
import time
import zlib
from collections import OrderedDict
from typing import Final

_MAX_BYTES: Final = 16 << 20


class KeptPages:
    """HTML of pages by address, compressed; the least recently shown ones are dropped. Thread-safe.

    Args:
        max_bytes: size of all compressed pages together.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pages: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, address: str, html: str) -> None:
        """Keep a page that was made now."""
        content = zlib.compress(html.encode(), 1)
        with self._lock:
            old, _ = self._pages.pop(address, (b"", 0.0))
            self._pages[address] = content, time.time()
            self._num_bytes += len(content) - len(old)
            while self._num_bytes > self._max_bytes:
                _, (dropped, _) = self._pages.popitem(last=False)
                self._num_bytes -= len(dropped)

    def get(self, address: str) -> tuple[str, float] | None:
        """Return the HTML of a page, and its age in seconds; None if it is not kept."""
        with self._lock:
            kept = self._pages.get(address)
        return None if kept is None else (zlib.decompress(kept[0]).decode(), time.time() - kept[1])
