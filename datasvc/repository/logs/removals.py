"""Log of the removed versions of one data set or model.

The log of versions keeps the entries of removed versions, so numbers are never reused and lineage stays complete.
Each entry of this log lists all removed versions, not only the new ones, so a reader needs only the newest entry.
A version whose entry cannot be read, and of which no copy exists, is removed by an entry that *marks it as lost*.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from datasvc.errors import CorruptDataError, UnreadableVersionWarning
from datasvc.repository.logs.log import Entry, Log, decode_numbers, encode_numbers
from datasvc.repository.store.storage import Storage


class Removals:
    """The removed versions of one data set or model; `folder` is its folder, `versions` the log of its versions."""

    def __init__(self, storage: Storage, folder: str, versions: Log) -> None:
        self._storage = storage
        self._log = Log(storage, f"{folder}/removals")
        self._versions = versions

    def removed(self, numbers: Iterable[int] | None = None, *, head: int | None = None) -> frozenset[int]:
        """Return the removed versions.

        If the newest entry of the log is damaged, an `UnreadableVersionWarning` is issued, and the versions that only
        this entry removes do not count as removed. The next removal writes the complete list again. If the caller has
        listed them, `numbers` are those of all versions, and `head` is that of the newest entry of this log, 0 for
        none.

        Raises:
            ConfigError, UnavailableError: see `Log.read`.
        """
        return self._read_newest_intact(self._log.head() if head is None else head, numbers)

    def removed_before(self, before_s: float) -> frozenset[int]:
        """Return the versions that were removed before `before_s`, and not restored by `restore` since.

        `before_s` is in seconds since 1970, by the clock of the store. `gc` deletes objects by this result. So unlike
        `removed`, this method tolerates no damage: it raises the errors of `Log.read`.
        """
        old = {file.path for file in self._storage.walk(self._log.path) if file.modified_s < before_s}
        numbers = self._log.numbers()
        newest_old = max((number for number in numbers if self._log.path_of(number) in old), default=0)
        if not newest_old:
            return frozenset()
        # Return only versions that are in all entries since then. A version that was restored and removed again is
        # missing in one of them, so it gets a new grace period.
        since = self._log.entries(number for number in numbers if number >= newest_old)
        all_versions = self._versions.numbers()
        return frozenset.intersection(*(self._removed_in(entry, all_versions) for entry in since))

    def find(self, version: int) -> Entry | None:
        """Return the entry that removed a version, or None if it is not removed; for errors, see `removed`.

        Of a version that was removed and then marked as lost, this is the entry that marked it.
        """
        numbers, all_versions = self._log.numbers(), self._versions.numbers()
        # A binary search is possible because each entry has the versions of the previous one, unless `restore` wrote
        # it. If a version was restored and removed again, the search finds one of its removals.
        first = bisect_left(
            numbers, True, key=lambda number: version in self._read_newest_intact(number, all_versions)
        )
        removal = self._log.read(numbers[first]) if first < len(numbers) else None
        if removal is None or "lost" in removal.content:
            return removal
        try:
            self._versions.read(version)
        except CorruptDataError:
            # Only such a version may be lost. Search the whole log only for it.
            return self._losses(numbers, all_versions).get(version, removal)
        return removal

    def add(self, versions: Iterable[int], message: str = "") -> Entry:
        """Remove versions; for errors, see `Log.append`."""
        to_remove = frozenset(versions)
        change = {"versions": encode_numbers(to_remove), "message": message}
        return self._append(lambda removed: removed | to_remove, change)

    def declare_lost(self, versions: Iterable[int], message: str = "") -> Entry:
        """Remove versions whose entries cannot be read, and record that they are lost; for errors, see `add`."""
        lost = frozenset(versions)
        change = {"versions": encode_numbers(lost), "lost": encode_numbers(lost), "message": message}
        return self._append(lambda removed: removed | lost, change)

    def lost(self) -> frozenset[int]:
        """Return the removed versions that were marked as lost; for errors, see `removed`.

        This reads the whole log, because the list of lost versions in an entry is not repeated in later entries.
        """
        numbers = self._log.numbers()
        if not numbers:
            return frozenset()
        all_versions = self._versions.numbers()
        losses = frozenset(self._losses(numbers, all_versions))
        # Even if the entry of a restoration is damaged, its version is not in the newest list.
        return losses & self._read_newest_intact(numbers[-1], all_versions)

    def restore(self, versions: Iterable[int], message: str) -> Entry:
        """Restore removed versions whose objects `gc` has not deleted yet; for errors, see `Log.append`."""
        to_restore = frozenset(versions)
        change = {"given_back": encode_numbers(to_restore), "message": message}
        return self._append(lambda removed: removed - to_restore, change)

    def _losses(self, numbers: Iterable[int], all_versions: Sequence[int]) -> dict[int, Entry]:
        """Return the entry that marked each lost version as lost; damaged entries are left out."""
        losses: dict[int, Entry] = {}
        for entry in self._log.try_entries(numbers)[0]:
            # A version that was restored and removed again is not lost, unless it was marked as lost again.
            for restored in decode_numbers(entry.content.get("given_back"), among=all_versions):
                losses.pop(restored, None)
            losses |= dict.fromkeys(decode_numbers(entry.content.get("lost"), among=all_versions), entry)
        return losses

    def _append(self, combine: Callable[[frozenset[int]], frozenset[int]], change: dict[str, str]) -> Entry:
        """Commit an entry with the fields of `change`. `combine` maps the removed versions so far to the new set."""
        # Read the head in each attempt: a concurrent writer may have removed other versions.
        return self._log.append(
            lambda head: {**change, "removed": encode_numbers(combine(self._read_newest_intact(head)))}
        )

    def _read_newest_intact(self, number: int, all_versions: Iterable[int] | None = None) -> frozenset[int]:
        """Return the removed versions of entry `number`; if it is damaged, of the newest intact entry before it."""
        for candidate in range(number, 0, -1):
            try:
                return self._read(candidate, all_versions)
            except CorruptDataError as error:
                if candidate == number:  # warn once, even if earlier entries are damaged too
                    name = self._log.path.split("/")[-2]
                    message = f"the newest removal of versions of {name} cannot be read: {error}"
                    advice = "the versions that it removed are listed again; remove them again"
                    warnings.warn(UnreadableVersionWarning(f"{name}@removals", f"{message}; {advice}"), stacklevel=3)
        return frozenset()

    def _read(self, number: int, all_versions: Iterable[int] | None = None) -> frozenset[int]:
        """Return the versions that entry `number` of the log lists as removed; none for number 0."""
        if not number:
            return frozenset()
        versions = self._versions.numbers() if all_versions is None else all_versions
        return self._removed_in(self._log.read(number), versions)

    def _removed_in(self, entry: Entry, all_versions: Iterable[int]) -> frozenset[int]:
        try:
            return decode_numbers(entry.content["removed"], among=all_versions)
        except KeyError as error:
            raise CorruptDataError(
                f"{self._log.path}, entry {entry.number}, has no field 'removed'; restore it from another copy"
            ) from error


def describe_removal(entry: Entry | None) -> str:
    """Return what the entry of a removal records, such as "was removed on 2026-11-21 (wrong labels)"."""
    if entry is None:
        return "was removed"
    why = f" ({entry.content['message']})" if entry.content.get("message") else ""
    return f"was {'declared lost' if entry.content.get('lost') else 'removed'} on {entry.content.get('created')}{why}"
