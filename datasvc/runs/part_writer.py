"""Writes the parts of one attempt, and replaces several small ones by merged ones, so that their number stays small.

Each attempt has one writer: it has created the header of the attempt, so its number is unique. If it is silent
for long, the next attempt ends it, see `ended_attempts`. Parts are merged in levels, as in a log-structured merge
tree: eight parts of a level become one of the next level. So a log of N parts has about 8 * log8(N) files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from datasvc.errors import DatasvcError
from datasvc.repository import Storage
from datasvc.runs.content import Content, ContentLimits
from datasvc.runs.part import Part, PartRange, encode_part
from datasvc.runs.part_files import create_part, delete_parts, merge_parts

PARTS_PER_MERGE: Final = 8
PART_LIMITS: Final = ContentLimits(num_bins=64, num_events=1000, size_bytes=1 << 20)
"""Limits of a part that is not merged; see `with_unused_bins`."""
MERGED_LIMITS: Final = ContentLimits(num_bins=256, num_events=1000, size_bytes=2 << 20)
ATTEMPT_LIMITS: Final = ContentLimits(num_bins=4096, num_events=5000, size_bytes=16 << 20)
"""Limits of the merged part of an attempt that has ended. Its size is below `MAX_PART_BYTES`."""

_LOG = logging.getLogger(__name__)


def with_unused_bins(limits: ContentLimits, num_bins: int) -> ContentLimits:
    """Return limits with the bins that are unused in an attempt whose other parts have `num_bins`, if these are more.

    So each step of a short attempt stays a point, until the attempt has as many as the limits of an attempt.
    """
    return replace(limits, num_bins=max(limits.num_bins, ATTEMPT_LIMITS.num_bins - num_bins))


class PartWriter:
    """Writer of the parts of one attempt.

    Args:
        storage: file tree of the repository.
        folder: folder of the run.
        attempt: number of the attempt, which this process has created.
    """

    def __init__(self, storage: Storage, folder: str, attempt: int) -> None:
        self._storage = storage
        self._folder = folder
        self.attempt = attempt
        self._num_parts = 0
        self._levels: list[list[Part]] = [[]]
        self._unwritten: tuple[Part, bytes] | None = None

    @property
    def num_bins(self) -> int:
        """Number of bins of the parts of this attempt."""
        unwritten = () if self._unwritten is None else self._unwritten[:1]
        return sum(part.content.num_bins for part in chain(*self._levels, unwritten))

    def write(self, head: Mapping[str, Any], content: Content) -> None:
        """Write the next part. If that fails, `write_again` tries again; for errors, see `create_part`.

        Raises:
            ConflictError: another process has continued the run, and has ended this attempt.
        """
        assert self._unwritten is None
        number = self._num_parts + 1
        part = Part(PartRange(self.attempt, number, number), head, content)
        self._unwritten = part, encode_part(part)
        self.write_again()

    def write_again(self) -> None:
        """Write the part that the store has refused, if there is one; for errors, see `write`."""
        if self._unwritten is None:
            return
        part, raw = self._unwritten
        # The same bytes as before: an earlier try may have stored them, although it raised an error.
        create_part(self._storage, self._folder, part.range, raw)
        self._unwritten = None
        self._num_parts += 1
        self._levels[0].append(part)
        self._merge_full_levels()

    def take_unwritten(self) -> Content:
        """Return the content of the part that the store has refused, and do not write it."""
        assert self._unwritten is not None
        part, self._unwritten = self._unwritten[0], None
        return part.content

    def finish(self) -> None:
        """Merge all parts but the newest one, whose head has the outcome of the run: lists read only that."""
        parts = [part for level in reversed(self._levels) for part in level][:-1]
        if len(parts) > 1:
            self._replace(parts, ATTEMPT_LIMITS)

    def _merge_full_levels(self) -> None:
        level = 0
        # The newest part is not merged before the next one exists: readers of the head read it, and it is small.
        while len(self._levels[level]) > PARTS_PER_MERGE:
            *parts, newest = self._levels[level]
            num_other_bins = self.num_bins - sum(part.content.num_bins for part in parts)
            merged = self._replace(parts, with_unused_bins(MERGED_LIMITS, num_other_bins))
            if merged is None:
                return  # merge more parts the next time
            self._levels[level] = [newest]
            level += 1
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level].append(merged)

    def _replace(self, parts: Sequence[Part], limits: ContentLimits) -> Part | None:
        """Replace consecutive parts by a merged one; return that, or None if it cannot be stored."""
        try:
            merged = merge_parts(self._storage, self._folder, parts, limits)
        except DatasvcError as error:
            _LOG.debug("%s: merging parts failed: %s", self._folder, error)
            return None
        if merged is not None:
            delete_parts(self._storage, self._folder, [part.range for part in parts])
        return merged
