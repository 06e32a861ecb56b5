"""The store through which the ranks of one round connect: it gives up as soon as one of them is gone.

Without it, ranks that wait for the address of one that has died wait for the whole timeout.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

_FIRST_PAUSE_S = 0.001
_MAX_PAUSE_S = 0.05


class RoundStore(Store):
    """Passes everything on to a store under a prefix of the round.

    Args:
        store: the job's.
        prefix: put before every key, different in every round.
        broken_key: of the job's store; once it exists, whoever waits for a key is let go.
        timeout_s: for which a key is waited for at most, unless the wait says otherwise.
    """

    def __init__(self, store: Store, *, prefix: str, broken_key: str, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._broken_key = broken_key
        self._timeout = dt.timedelta(seconds=timeout_s)

    def set(self, key: str, value: str) -> None:
        """See `torch.distributed.Store`, as for the others."""
        self._store.set(self._named(key), value)

    def get(self, key: str) -> bytes:
        """Waits for the key.

        Raises:
            RuntimeError: a member of the round is gone, or the timeout is over.
        """
        self.wait([key])
        return bytes(self._store.get(self._named(key)))

    def add(self, key: str, amount: int) -> int:
        """See `set`."""
        return int(self._store.add(self._named(key), amount))

    def check(self, keys: Sequence[str]) -> bool:
        """See `set`."""
        return bool(self._store.check([self._named(key) for key in keys]))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `set`."""
        return bytes(self._store.compare_set(self._named(key), expected, desired))

    def delete_key(self, key: str) -> bool:
        """See `set`."""
        return bool(self._store.delete_key(self._named(key)))

    def num_keys(self) -> int:
        """Of all rounds."""
        return int(self._store.num_keys())

    def set_timeout(self, timeout: dt.timedelta) -> None:
        """For `wait` and `get` from now on."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """Whether there are `append` and the like: nobody here needs them."""
        return False

    def wait(self, keys: Sequence[str], timeout: dt.timedelta | None = None) -> None:
        """Returns when the keys exist.

        Raises:
            RuntimeError: see `get`.
        """
        deadline_s = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _FIRST_PAUSE_S
        # Asked in turns: a wait inside the store could not be let go.
        while not self.check(keys):
            if self._store.check([self._broken_key]):
                raise RuntimeError(self._store.get(self._broken_key).decode())
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited too long for {', '.join(keys)}")
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _MAX_PAUSE_S)

    def _named(self, key: str) -> str:
        return f"{self._prefix}/{key}"
