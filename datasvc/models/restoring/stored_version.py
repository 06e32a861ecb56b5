"""Reads a stored version without its tensors: the entry, with its signature checked, and the tensor table.

Every restore begins with `read_version`, so that trusted keys are always enforced.
"""

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
    """A version without the bytes of its tensors.

    Attributes:
        version: name and number of the version.
        entry: content of its log entry.
        records: records of its tensors, sorted by name.
        state: digest of its state object.
    """

    version: Resolved
    entry: Mapping[str, Any]
    records: tuple[TensorRecord, ...]
    state: Digest


def read_version(
    repository: Repository,
    ref: str | Resolved,
    *,
    read: Callable[[Digest, int], bytes] | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
) -> StoredVersion:
    """Return the version that `ref` resolves to, without the bytes of its tensors.

    `read` returns a verified object of at most the given size in bytes; default: `Objects.read` of the repository.
    For the other arguments see `restore.restore`.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`, `signing_keys.trusted_keys`.
        CorruptDataError: the entry or the table is damaged, or none of the keys has signed the version.
    """
    keys = load_trusted_keys(trusted_keys)
    version = repository.resolve("models", ref)
    entry = repository.entry(version)
    # Check the signature first: an object that an untrusted entry names must not be read.
    if keys:
        check_signed(repository, version, entry, keys)
    refs = objects_of_entry(entry.content, version)
    content = (read or repository.objects.read)(refs.tensors, MAX_TABLE_BYTES)
    records = decode_table(content, f"the tensor table {refs.tensors} of {version}")
    return StoredVersion(version, entry.content, records, refs.state)
