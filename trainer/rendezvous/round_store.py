"""The store through which the ranks of one round connect; its waits fail as soon as one of the ranks is lost.

With torch's own store, ranks that wait for the address of a dead rank would wait for the full timeout.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from datasvc.trainer.errors import HorovodInternalError

# Pauses between two checks in a wait: the first one, and the maximum to which they double.
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
        self._prefixed_store = PrefixStore(prefix, store)
        self._broken_key = broken_key
        self._timeout = dt.timedelta(seconds=timeout_s)

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._prefixed_store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value.

        Raises:
            HorovodInternalError: a member of the round is lost.
            DistStoreError: the timeout has expired.
        """
        self.wait([key])
        return bytes(self._prefixed_store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to the number that is the value of a key, and return the sum; a missing key counts as 0."""
        return int(self._prefixed_store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._prefixed_store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the value of a key to `desired` if it is `expected`, as `torch.distributed.Store` does."""
        return bytes(self._prefixed_store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return bool(self._prefixed_store.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys of all rounds."""
        return int(self._store.num_keys())

    def set_timeout(self, timeout: dt.timedelta) -> None:
        """Set the default limit of a wait for a key."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """Return False: `append` and the other extended methods are not implemented."""
        return False

    def wait(self, keys: Sequence[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until the keys exist.

        Raises:
            HorovodInternalError: a member of the round is lost.
            DistStoreError: the timeout has expired, as in torch's own stores.
        """
        deadline_s = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _FIRST_PAUSE_S
        # Poll, because a wait inside the store would not end when a member is lost.
        while not self.check(keys):
            if self._store.check([self._broken_key]):
                raise HorovodInternalError(self._store.get(self._broken_key).decode())
            if time.monotonic() > deadline_s:
                raise DistStoreError(f"no other rank has set {', '.join(keys)} in time")
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _MAX_PAUSE_S)
