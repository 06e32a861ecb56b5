"""A version as it is stored, before any tensor of it is read: its entry, trusted or refused, and its tensor table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasvc.models.tensors.tensor_table import MAX_TABLE_BYTES, TensorRecord, decode_table
from datasvc.models.versions.entry_refs import objects_of_entry
from datasvc.models.versions.signing import check_signed
from datasvc.models.versions.signing_keys import trusted_keys as load_trusted_keys
from datasvc.repository import Digest, Repository, Resolved


@dataclass(frozen=True)
class StoredVersion:
    """What is known of a version without its tensors.

    Attributes:
        version: which.
        entry: what its entry says.
        records: of its tensors, by name.
        state: digest of its state object.
    """

    version: Resolved
    entry: Mapping[str, Any]
    records: tuple[TensorRecord, ...]
    state: Digest

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors in memory."""
        return sum(record.nbytes for record in self.records)


def read_version(
    repository: Repository,
    ref: str | Resolved,
    *,
    read: Callable[[Digest, int], bytes] | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
) -> StoredVersion:
    """Return the version that `ref` means now. Everything that restores goes through here, so that keys are obeyed.

    Args:
        repository: has the version.
        ref: NAME, NAME@VERSION or NAME@TAG, or what a save returned.
        read: returns a whole object that has at most so many bytes, verified; default the repository's.
        trusted_keys: files of public keys, by one of which the version must be signed; () for none, None for those
            that `DATASVC_TRUSTED_KEYS` names.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`, `signing_keys.trusted_keys`.
        CorruptDataError: the entry or the table was changed, or the version is not signed by any of the keys.
    """
    keys = load_trusted_keys(trusted_keys)
    version = repository.resolve("models", ref)
    entry = repository.entry(version)
    if keys:
        check_signed(repository, version, entry, keys)
    named = objects_of_entry(entry.content, version)
    content = (read or repository.objects.read)(named.tensors, MAX_TABLE_BYTES)
    records = decode_table(content, repository.objects.location(named.tensors))
    return StoredVersion(version, entry.content, records, named.state)
