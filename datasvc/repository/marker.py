"""The marker at the root of every repository: its format, and the check that the store honours create-only writes."""

from __future__ import annotations

import json

from datasvc.errors import ConfigError, ConflictError, CorruptDataError
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import Storage

REPOSITORY_FORMAT = 1
MARKER = "datasvc.json"  # file at the root of every repository
MARKER_BYTES = json.dumps({"format": REPOSITORY_FORMAT}).encode() + b"\n"


def check_marker(raw: bytes, location: str) -> None:
    """Raise ConfigError for a later format, CorruptDataError for something else than a marker."""
    try:
        stored_format = int(json.loads(raw)["format"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"{location} is corrupt: expected {MARKER_BYTES!r}, found {raw[:80]!r}") from error
    if stored_format > REPOSITORY_FORMAT:
        raise ConfigError(
            f"the repository {location} has format {stored_format}; this datasvc reads up to {REPOSITORY_FORMAT}: "
            "upgrade datasvc"
        )


def check_create_only(storage: Storage) -> None:
    """Raise ConfigError if the store overwrites an existing file in a create-only write."""
    probe = json.dumps({"format": REPOSITORY_FORMAT, "probe": True}).encode()
    try:
        storage.create(MARKER, probe)
    except ConflictError:
        return
    storage.put_bytes(MARKER, MARKER_BYTES)  # restore the content, which the second create has overwritten
    raise ConfigError(
        f"{redact_url(storage.url)} ignores create-only writes, so commits could overwrite each other; use a store "
        "that honours If-None-Match"
    )
