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
from datasvc.repository.logs.log import decode_entry, encode_entry
from datasvc.repository.store.storage import Storage

JOURNALS = "journal"
_PLAN = "plan.json"
_READS_AT_ONCE = 16
_NAME_DIGITS = 32


class Journal:
    """The journal of one plan.

    Args:
        storage: the repository's tree.
        work: names what is done: equal work has equal names, such as a digest.
        fingerprint: of what it is done on, a digest: the same work on anything else has another journal.
        attempt: from `begin`, for those that only write records.
    """

    def __init__(self, storage: Storage, work: str, fingerprint: str, attempt: str | None = None) -> None:
        self._storage = storage
        self._work = f"{work[:_NAME_DIGITS]}-"
        self._name = f"{self._work}{fingerprint[:_NAME_DIGITS]}"
        self._folder = f"{JOURNALS}/{self._name}"
        self._attempt = attempt

    def begin(self) -> tuple[str, bool]:
        """Go on with the work, or start it.

        Returns:
            The attempt: a random text that stays the same until the journal is removed, whoever continues; and
            whether there are journals of the same work on another state of what it is done on.

        Raises:
            UnavailableError: the store does not answer.
        """
        names = self._storage.list(JOURNALS)
        has_changed = self._name not in names and any(name.startswith(self._work) for name in names)
        self._attempt = self._go_on() or self._start()
        return self._attempt, has_changed

    def _go_on(self) -> str | None:
        found = self._read(_PLAN)
        if found is None:
            return None
        # Young again: `gc` leaves alone what the records of a young journal name.
        path, content = f"{self._folder}/{_PLAN}", encode_entry(found)
        if not self._storage.refresh(path, len(content)):
            self._storage.put_bytes(path, content)
        return str(found["attempt"])

    def _start(self) -> str:
        path, attempt = f"{self._folder}/{_PLAN}", secrets.token_hex(16)
        content = encode_entry({"attempt": attempt})
        try:
            self._storage.create(path, content)
        except ConflictError:
            # The same work was started by somebody else just now, or what is there is damaged.
            other = self._go_on()
            if other is not None:
                return other
            self._storage.put_bytes(path, content)
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
            location = self._storage.location(path)
            return self._storage.read_checked(path, lambda raw: decode_entry(raw, location))
        except (NotFoundError, CorruptDataError):
            return None
