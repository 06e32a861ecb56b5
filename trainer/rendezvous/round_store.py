"""The store through which the ranks of one round connect; its waits fail as soon as one of the ranks is lost.

With torch's own store, ranks that wait for the address of a dead rank would wait for the full timeout.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

_FIRST_PAUSE_S = 0.001
_MAX_PAUSE_S = 0.05


class RoundStore(Store):
    """A view of the job's store with a key prefix for the round; torch calls its methods to form process groups.

    Args:
        store: store of the job.
        prefix: prefix of every key, different in every round.
        broken_key: key of the job's store. If it exists, a member of the round is lost, and every wait fails.
        timeout_s: default limit of a wait for a key.
    """

    def __init__(self, store: Store, *, prefix: str, broken_key: str, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._round = PrefixStore(prefix, store)
        self._broken_key = broken_key
        self._timeout = dt.timedelta(seconds=timeout_s)

    def set(self, key: str, value: str) -> None:
        """See `torch.distributed.Store`."""
        self._round.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value.

        Raises:
            RuntimeError: a member of the round is lost, or the timeout has expired.
        """
        self.wait([key])
        return bytes(self._round.get(key))

    def add(self, key: str, amount: int) -> int:
        """See `torch.distributed.Store`."""
        return int(self._round.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """See `torch.distributed.Store`."""
        return bool(self._round.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `torch.distributed.Store`."""
        return bytes(self._round.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """See `torch.distributed.Store`."""
        return bool(self._round.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys of all rounds."""
        return int(self._store.num_keys())

    def set_timeout(self, timeout: dt.timedelta) -> None:
        """Set the limit of `wait` and `get`."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """Return False: `append` and the other extended methods are not implemented."""
        return False

    def wait(self, keys: Sequence[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until the keys exist.

        Raises:
            RuntimeError: see `get`.
        """
        deadline_s = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _FIRST_PAUSE_S
        # Polling: a wait inside the store could not be interrupted when a member is lost.
        while not self.check(keys):
            if self._store.check([self._broken_key]):
                raise RuntimeError(self._store.get(self._broken_key).decode())
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no other rank has set {', '.join(keys)} in time")
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _MAX_PAUSE_S)
