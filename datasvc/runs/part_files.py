"""Files of parts in the folder of a run: read several, create one, merge several to one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.repository import Storage
from datasvc.runs.content import ContentLimits, merge
from datasvc.runs.part import MAX_PART_BYTES, Part, PartRange, decode_part, encode_part
from datasvc.threads import map_in_threads

READS_AT_ONCE: Final = 16


def read_parts(
    storage: Storage, folder: str, ranges: Sequence[PartRange], *, threads: int = READS_AT_ONCE
) -> tuple[list[Part] | None, list[str]]:
    """Return the parts that can be read, in the order of `ranges`, and the problems of others.

    The first result is None if one of them was merged meanwhile: list the folder again. Raises UnavailableError: the
    store does not respond.
    """

    def read(part: PartRange) -> Part | str:
        try:
            decode = partial(decode_part, part=part)
            return storage.read_checked(f"{folder}/{part.file_name}", decode, max_bytes=MAX_PART_BYTES)
        except (CorruptDataError, ConfigError) as error:
            return str(error)

    try:
        # Files of a local disk are read faster than threads start.
        results = map_in_threads(read, ranges, threads) if threads > 1 and not storage.is_local else map(read, ranges)
        found = list(results)
    except NotFoundError:
        return None, []
    parts = [part for part in found if isinstance(part, Part)]
    return parts, [problem for problem in found if isinstance(problem, str)]


def create_part(storage: Storage, folder: str, part: PartRange, raw: bytes) -> None:
    """Create the file of a part; do nothing if it exists with these bytes.

    Raises:
        ConflictError: it exists with other bytes.
        UnavailableError, UnknownOutcomeError, ConfigError: see `Storage.create`.
    """
    path = f"{folder}/{part.file_name}"
    try:
        storage.create(path, raw)
    except ConflictError:
        if storage.read(path) != raw:
            raise


def merge_parts(storage: Storage, folder: str, parts: Sequence[Part], limits: ContentLimits) -> Part | None:
    """Create the merged part of consecutive parts; then delete these with `delete_parts`.

    Returns None if readers would refuse its size: the parts must stay. For errors, see `create_part`.
    """
    merged_range = PartRange(parts[0].range.attempt, parts[0].range.first, parts[-1].range.last)
    merged = Part(merged_range, parts[-1].head, merge(part.content for part in parts).thin(limits))
    raw = encode_part(merged)
    if len(raw) > MAX_PART_BYTES:
        return None
    create_part(storage, folder, merged_range, raw)
    return merged


def delete_parts(storage: Storage, folder: str, ranges: Sequence[PartRange]) -> None:
    """Delete parts that a merged one has replaced. If that fails they stay, and readers ignore them."""
    for part in ranges:
        with suppress(DatasvcError):
            storage.delete_if_older(f"{folder}/{part.file_name}", math.inf)
