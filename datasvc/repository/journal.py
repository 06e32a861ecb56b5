"""The journal of an unfinished piece of work: what of it is done, so that a killed one goes on.

A folder of small JSON records below `journal/`, each with a checksum. Nothing in it is ever relied on without being
checked: a record that a power cut damaged only means that its part of the work is done again. Journals are removed
when their work is committed; `gc` removes those that nobody came back to.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from datasvc.errors import ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.log import decode_entry, encode_entry
from datasvc.repository.storage import Storage

JOURNALS = "journal"
_PLAN = "plan.json"
_READS_AT_ONCE = 16


class Journal:
    """The journal of one plan.

    Args:
        storage: the repository's tree.
        plan: names the work: equal work has equal names, such as a digest.
        attempt: from `begin`, for those that only write records.
    """

    def __init__(self, storage: Storage, plan: str, attempt: str | None = None) -> None:
        self._storage = storage
        self._folder = f"{JOURNALS}/{plan}"
        self._attempt = attempt

    def begin(self, fingerprint: str) -> tuple[str, bool]:
        """Go on with the work, or start it.

        Args:
            fingerprint: of what the work is done on; records of work on anything else do not count.

        Returns:
            The attempt: a random text that stays the same until the journal is removed, whoever continues; and
            whether the journal was of another fingerprint.

        Raises:
            UnavailableError: the store does not answer.
        """
        found = self._read(_PLAN)
        if found is not None and found["fingerprint"] == fingerprint:
            # Written again: a journal that is young keeps `gc` from what its records name.
            self._storage.put_bytes(f"{self._folder}/{_PLAN}", encode_entry(found), synced=False)
            self._attempt = str(found["attempt"])
            return self._attempt, False
        has_changed = found is not None
        if has_changed:
            self.remove()
        self._attempt = self._start(fingerprint)
        return self._attempt, has_changed

    def _start(self, fingerprint: str) -> str:
        attempt = secrets.token_hex(16)
        content = encode_entry({"fingerprint": fingerprint, "attempt": attempt})
        try:
            self._storage.create(f"{self._folder}/{_PLAN}", content)
        except ConflictError:
            other = self._read(_PLAN)  # the same work was started by somebody else just now
            if other is not None and other["fingerprint"] == fingerprint:
                return str(other["attempt"])
            raise
        return attempt

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Record that a piece of the work is done. Raises UnavailableError."""
        assert self._attempt is not None
        # Not synced: a record lost in a power cut costs its piece of the work, and nothing more.
        self._storage.put_bytes(
            f"{self._folder}/{name}.json", encode_entry({**content, "attempt": self._attempt}), synced=False
        )

    def read_all(self) -> dict[str, dict[str, Any]]:
        """Return every record of this attempt that is whole, by name. Raises UnavailableError."""
        names = [name for name in self._storage.list(self._folder) if name != _PLAN and name.endswith(".json")]
        with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="datasvc-journal") as pool:
            contents = pool.map(self._read, names)
            return {
                name.removesuffix(".json"): content
                for name, content in zip(names, contents, strict=True)
                if content is not None and content.pop("attempt", None) == self._attempt
            }

    def remove(self) -> None:
        """Remove the journal. Raises UnavailableError."""
        self._storage.delete_folder(self._folder)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = f"{self._folder}/{name}"
        try:
            return decode_entry(self._storage.read(path), self._storage.location(path))
        except (NotFoundError, CorruptDataError):
            return None
