"""Journals of unfinished work.

An ingest records its finished parts: if its process is killed, a later process does only the rest. A transfer to a
repository records the objects that its versions will reference, so that `gc` keeps them. A journal is a folder of
small JSON records, each with a checksum; a part with a damaged record is done again. A journal is removed when its
work is committed; `gc` removes old journals that were never resumed.

The record `plan.json` is written first. It has the random identifier of the *attempt*; every later record repeats
it. If the plan is damaged, a new attempt begins, and the records of the old attempt are ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from datasvc.errors import ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.logs.log import decode_entry, encode_entry
from datasvc.repository.store.storage import Storage
from datasvc.threads import map_in_threads

JOURNALS = "journal"
_PLAN = "plan.json"
_READS_AT_ONCE = 16
_NAME_DIGITS = 32  # digits of `work` and of `fingerprint` in the folder's name; 128 bits of a digest


class Journal:
    """Journal of one piece of work.

    Args:
        storage: file tree of the repository.
        work: identifier of the work, such as a digest of its options.
        fingerprint: digest of the input. The same work on a changed input has another journal.
        attempt: identifier that `begin` returned in another process; None in the process that calls `begin`.
    """

    def __init__(self, storage: Storage, work: str, fingerprint: str, attempt: str | None = None) -> None:
        self._storage = storage
        self._work_prefix = f"{work[:_NAME_DIGITS]}-"
        self._name = f"{self._work_prefix}{fingerprint[:_NAME_DIGITS]}"
        self._folder = f"{JOURNALS}/{self._name}"
        self._attempt = attempt

    def begin(self) -> tuple[str, bool]:
        """Resume the work, or start it. Raises UnavailableError.

        Returns:
            The identifier of the attempt, which is the same in every process that resumes the work; and whether the
            input has changed: the work has journals, but none with this fingerprint.
        """
        names = self._storage.list(JOURNALS)
        has_changed = self._name not in names and any(name.startswith(self._work_prefix) for name in names)
        self._attempt = self._resume() or self._start()
        return self._attempt, has_changed

    def _resume(self) -> str | None:
        """Return the attempt of the existing journal, or None if there is no intact plan."""
        plan = self._read(_PLAN)
        if plan is None:
            return None
        # Reset the age of the journal: `gc` keeps objects that the records of a young journal reference.
        path, content = f"{self._folder}/{_PLAN}", encode_entry(plan)
        if not self._storage.refresh(path, len(content)):
            self._storage.put_bytes(path, content)
        return str(plan["attempt"])

    def _start(self) -> str:
        """Create the plan and return its attempt. If another process created it first, return its attempt."""
        path, attempt = f"{self._folder}/{_PLAN}", secrets.token_hex(16)
        content = encode_entry({"attempt": attempt})
        try:
            self._storage.create(path, content)
        except ConflictError:
            # Another process has just started the same work: resume it. Or the existing plan is damaged: replace it.
            other_attempt = self._resume()
            if other_attempt is not None:
                return other_attempt
            self._storage.put_bytes(path, content)
        return attempt

    def write(self, name: str, content: Mapping[str, Any], *, synced: bool = False) -> None:
        """Record that a part of the work is done. Raises UnavailableError if the store does not respond.

        If a power cut loses a record that is not `synced`, its part is done again.
        """
        assert self._attempt is not None
        record = encode_entry({**content, "attempt": self._attempt})
        self._storage.put_bytes(f"{self._folder}/{name}.json", record, synced=synced)

    def read_all(self) -> dict[str, dict[str, Any]]:
        """Return every intact record of this attempt, by name; before `begin`, of the one that it would resume.

        Raises UnavailableError if the store fails.
        """
        attempt = self._attempt or (self._read(_PLAN) or {}).get("attempt")
        names = [name for name in self._storage.list(self._folder) if name != _PLAN and name.endswith(".json")]
        contents = map_in_threads(self._read, names, _READS_AT_ONCE)
        return {
            name.removesuffix(".json"): content
            for name, content in zip(names, contents, strict=True)
            if content is not None and content.pop("attempt", None) == attempt
        }

    def remove(self) -> None:
        """Remove the journal. Raises UnavailableError if the store does not respond."""
        self._storage.delete_folder(self._folder)

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return a record, or None if it does not exist or is damaged."""
        try:
            return self._storage.read_checked(f"{self._folder}/{name}", decode_entry)
        except (NotFoundError, CorruptDataError):
            return None
