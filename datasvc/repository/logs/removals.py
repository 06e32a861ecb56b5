"""Which versions of a name were removed: a log beside that of the versions.

The log of versions never loses an entry, so numbers are never used twice and what a removed version came from stays
known. A removal is an entry here. Each names every version that is removed by then, so that the newest alone tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from datasvc.errors import CorruptDataError
from datasvc.repository.logs.log import Entry, Log
from datasvc.repository.logs.version_numbers import decode_numbers, encode_numbers
from datasvc.repository.store.storage import Storage


class Removals:
    """The removed versions of one name.

    Args:
        storage: the repository's tree.
        folder: of the name, "models/digits-cnn".
        versions: the log of its versions.
    """

    def __init__(self, storage: Storage, folder: str, versions: Log) -> None:
        self._storage = storage
        self._log = Log(storage, f"{folder}/removals")
        self._versions = versions

    def removed(self, numbers: Iterable[int] | None = None) -> frozenset[int]:
        """Return the versions that are removed.

        Args:
            numbers: those of the versions, where the caller has listed them already.

        Raises:
            CorruptDataError, UnavailableError: see `Log.read`.
        """
        return self._read(self._log.head(), numbers)

    def removed_before(self, before_s: float) -> frozenset[int]:
        """Return the versions that were removed before, by the store's clock, and ever since. Raises as `removed`."""
        old = {file.path for file in self._storage.walk(self._log.path) if file.modified_s < before_s}
        numbers = self._log.numbers()
        newest = max((number for number in numbers if self._log.path_of(number) in old), default=0)
        if not newest:
            return frozenset()
        # What was given back in between was removed anew, and its grace begins anew.
        since = self._log.entries(number for number in numbers if number >= newest)
        listed = self._versions.numbers()
        return frozenset.intersection(*(self._removed_in(entry, listed) for entry in since))

    def find(self, version: int) -> Entry | None:
        """Return the entry that removed a version, None where none did. Raises as `removed`."""
        numbers, listed = self._log.numbers(), self._versions.numbers()
        low, high = 0, len(numbers)
        # Entries only ever add versions, but for one that was given back: then any of its removals is found.
        while low < high:
            middle = (low + high) // 2
            if version in self._read(numbers[middle], listed):
                high = middle
            else:
                low = middle + 1
        return self._log.read(numbers[low]) if low < len(numbers) else None

    def add(self, versions: Iterable[int], message: str = "") -> Entry:
        """Remove versions. Raises as `Log.append`."""
        wanted = frozenset(versions)
        change = {"versions": encode_numbers(wanted), "message": message}
        return self._append(lambda removed: removed | wanted, change)

    def give_back(self, versions: Iterable[int], message: str) -> Entry:
        """Take a removal back that must not have happened, before `gc` heeds it. Raises as `add`."""
        wanted = frozenset(versions)
        change = {"given_back": encode_numbers(wanted), "message": message}
        return self._append(lambda removed: removed - wanted, change)

    def _append(self, combine: Callable[[frozenset[int]], frozenset[int]], change: dict[str, str]) -> Entry:
        # Read anew for each attempt: whoever was faster may have removed versions that this process never saw.
        return self._log.append(lambda head: {**change, "removed": encode_numbers(combine(self._read(head)))})

    def _read(self, entry: int, numbers: Iterable[int] | None = None) -> frozenset[int]:
        if not entry:
            return frozenset()
        return self._removed_in(self._log.read(entry), self._versions.numbers() if numbers is None else numbers)

    def _removed_in(self, entry: Entry, listed: Iterable[int]) -> frozenset[int]:
        try:
            return decode_numbers(entry.content["removed"], among=listed)
        except KeyError as error:
            raise CorruptDataError(f"{self._log.path}, entry {entry.number}, does not say what is removed") from error
