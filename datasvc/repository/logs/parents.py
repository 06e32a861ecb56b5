"""Which versions a data-set version continues: `parent` and `merged` of its entry, and what their absence means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.repository.logs.heads import PositionReader
from datasvc.repository.logs.lines import MAIN, find_head
from datasvc.repository.logs.references import parse_reference

MERGED: Final = "merged"


def parents_of(read: PositionReader, number: int) -> list[int]:
    """Return the versions of the data set that a version continues; of a merge, that of its own line is the first.

    An ingest without `append` on the main line takes the place of the version before it, which then is its parent.
    """
    content = read.entry(number).content
    parents = [parent for parent in map(_number_of, recorded_parents(content)) if parent is not None]
    # In a copy from another repository, the version before it need not be one that it continues there.
    if not parents and content.get("origin") is None:
        position = read(number)
        before = find_head(read, MAIN, position.before(MAIN)) if position.line == MAIN else None
        parents = [] if before is None else [before]
    return [parent for parent in parents if 0 < parent < number]


def recorded_parents(content: Mapping[str, Any]) -> list[str]:
    """Return the references in `parent` and `merged` of the entry of a data-set version."""
    merged = content.get(MERGED)
    return [str(ref) for ref in (content.get("parent"), *(merged if isinstance(merged, list) else ())) if ref]


def _number_of(ref: str) -> int | None:
    # The name may be an earlier one of the data set, see `rename`; the number is the same.
    try:
        return parse_reference(ref).version
    except ConfigError:
        return None
