"""Parts: the files of a run log. A part never changes; it is created whole, and has a checksum.

An attempt has one writer and at most two current parts: one with most of its content, and one with what came since.
Each write creates one of them whole under a new name, then removes the part that it replaces. So readers find every
event at any time, and a writer that is killed leaves some files only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.repository import Storage
from datasvc.repository.objects.objects import digest_of
from datasvc.runs.content import Content, ContentLimits, merge
from datasvc.runs.facts import RunEvent, encode_event, encode_line
from datasvc.runs.step_table import StepTable
from datasvc.threads import map_in_threads

PART_FORMAT: Final = 1
READS_AT_ONCE: Final = 16
WRITE_LIMITS: Final = ContentLimits(num_bins=64, num_events=1000, size_bytes=1 << 20)
"""Limits of what one write adds; see `with_unused_bins`."""
ATTEMPT_LIMITS: Final = ContentLimits(num_bins=4096, num_events=5000, size_bytes=16 << 20)
"""Limits of the part that has most of an attempt. Its size is below `_MAX_PART_BYTES`."""
_MAX_PART_BYTES: Final = 64 << 20
_RECENT_BYTES: Final = 32 << 10
_RECENT_SHARE: Final = 32
_MAX_TIME_S: Final = 1e11  # some 3,000 years; `time.localtime` takes it
_FILE_NAME: Final = re.compile(r"(\d{8,18})\.(\d{8,18})-(\d{8,18})\.jsonl")


@dataclass(frozen=True, order=True)
class PartRange:
    """Which writes of an attempt a file has: `first` to `last`, both included; numbers are from 1 on."""

    attempt: int
    first: int
    last: int

    @property
    def file_name(self) -> str:
        """Name of the file in the folder of the run."""
        return f"{self.attempt:08d}.{self.first:08d}-{self.last:08d}.jsonl"

    @classmethod
    def parse(cls, file_name: str) -> Self | None:
        """Return the range of a file name, or None if the file is no part."""
        match = _FILE_NAME.fullmatch(file_name)
        return None if match is None else cls(*map(int, match.groups()))


def choose_parts(file_names: Iterable[str]) -> list[PartRange]:
    """Return the parts that have every event once, oldest first, without those that others replace."""
    ranges = [part for name in file_names if (part := PartRange.parse(name)) is not None]
    chosen: list[PartRange] = []
    for part in sorted(ranges, key=lambda part: (part.attempt, part.first, -part.last)):
        if not chosen or part.attempt > chosen[-1].attempt or part.first > chosen[-1].last:
            chosen.append(part)
    return chosen


@dataclass(frozen=True)
class Part:
    """A part: its range, the state of the run when it was written, and its content.

    `head` has what the list of runs needs (docs/reference/formats.md), as of the last write of the part.
    """

    range: PartRange
    head: Mapping[str, Any]
    content: Content


def encode_part(part: Part) -> bytes:
    """Return the bytes of a part: JSON lines, of which the last one has the checksum of the others."""
    head = {**part.head, "format": PART_FORMAT}
    if part.content.num_left_out:
        head["left_out"] = part.content.num_left_out
    lines = [head, *({"steps": table.to_json()} for table in part.content.tables)]
    body = b"".join([*map(encode_line, lines), *map(encode_event, part.content.events)])
    return body + encode_line({"checksum": digest_of(body)})


def decode_part(raw: bytes, location: str, part: PartRange) -> Part:
    """Return the part of `encode_part`.

    Raises:
        CorruptDataError: the checksum does not match, or a line has another form.
        ConfigError: the part has a later format.
    """
    try:
        body, _, last = raw.removesuffix(b"\n").rpartition(b"\n")
        head, *lines = map(json.loads, body.splitlines())
        is_intact = json.loads(last) == {"checksum": digest_of(body + b"\n")}
        is_later = int(head["format"]) > PART_FORMAT
        if is_intact and not is_later:
            tables = [StepTable.from_json(line["steps"]) for line in lines if "steps" in line]
            events = [_decode_event(line, part.attempt) for line in lines if "event" in line]
            num_left_out = int(head.pop("left_out", 0))
            return Part(part, _check_head(head), Content(tables, events, num_left_out))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"{location} is corrupt: {error}; the other parts can be read") from error
    if is_intact:
        raise ConfigError(
            f"{location} has format {head['format']}; this datasvc reads up to {PART_FORMAT}: upgrade it"
        )
    raise CorruptDataError(f"{location} is corrupt: its checksum does not match; the other parts can be read")


def _decode_event(line: Mapping[str, Any], attempt: int) -> RunEvent:
    event, facts = line["event"], line["facts"]
    if not isinstance(event, str) or not isinstance(facts, dict):
        raise TypeError("the name or the facts of an event have another form")
    return RunEvent(float(line["time"]), event, facts, attempt)


def _check_head(head: Any) -> Mapping[str, Any]:
    """Return the head of a part. Raises TypeError or ValueError: a field that readers use has another form."""
    if not isinstance(head["state"], str) or not isinstance(head["latest"], dict):
        raise TypeError("the head of a part has another form")
    if not isinstance(head["versions"], list) or not all(isinstance(ref, str) for ref in head["versions"]):
        raise TypeError("the versions of a run are not texts")
    time_s, heartbeat_s = float(head["time"]), float(head["heartbeat_s"])
    if not 0 <= time_s < _MAX_TIME_S or not 0 <= heartbeat_s < _MAX_TIME_S:
        raise ValueError(f"the time of a part is {time_s}, its heartbeat {heartbeat_s} s")
    return {**head, "time": time_s, "heartbeat_s": heartbeat_s, "lost": int(head["lost"])}


def read_parts(storage: Storage, folder: str, ranges: Sequence[PartRange]) -> tuple[list[Part] | None, list[str]]:
    """Return the parts that can be read, in the order of `ranges`, and the problems of others.

    The first result is None if one of them was replaced meanwhile: list the folder again. Raises UnavailableError:
    the store does not respond.
    """

    def read(part: PartRange) -> Part | str:
        try:
            decode = partial(decode_part, part=part)
            return storage.read_checked(f"{folder}/{part.file_name}", decode, max_bytes=_MAX_PART_BYTES)
        except (CorruptDataError, ConfigError) as error:
            return str(error)

    try:
        # Files of a local disk are read faster than threads start.
        found = list(map(read, ranges) if storage.is_local else map_in_threads(read, ranges, READS_AT_ONCE))
    except NotFoundError:
        return None, []
    parts = [part for part in found if isinstance(part, Part)]
    return parts, [problem for problem in found if isinstance(problem, str)]


def with_unused_bins(limits: ContentLimits, num_bins: int) -> ContentLimits:
    """Return limits with the bins that are unused in an attempt that has `num_bins`, if these are more.

    So each step of a short attempt stays a point, until the attempt has as many as its limits.
    """
    return replace(limits, num_bins=max(limits.num_bins, ATTEMPT_LIMITS.num_bins - num_bins))


class AttemptWriter:
    """Writer of the parts of one attempt.

    Args:
        storage: file tree of the repository.
        folder: folder of the run.
        attempt: number of the attempt, of which this process has created the header: no other process writes it.
    """

    def __init__(self, storage: Storage, folder: str, attempt: int) -> None:
        self.attempt = attempt
        self._storage = storage
        self._folder = folder
        self._most = self._recent = Content()
        self._most_bytes = 0
        self._first_recent = 1
        self._last = 0
        self._is_most_due = False
        self._files: list[PartRange] = []  # that may exist, without `_replaced`
        self._replaced: list[PartRange] = []  # by the newest part

    @property
    def num_bins(self) -> int:
        """Number of bins of this attempt."""
        return self._most.num_bins + self._recent.num_bins

    def write(self, head: Mapping[str, Any], content: Content, *, is_last: bool) -> int:
        """Add content, and create a part with it; the last one is empty, because lists of runs read it.

        Return the bytes that this took. If it fails, the next call writes this content too. Raises the errors of
        `Storage.create`.
        """
        self._last, most_bytes = self._last + 1, 0
        self._recent = merge([self._recent, content])
        if self._is_most_due or is_last:
            self._most, self._recent = merge([self._most, self._recent]).thin(ATTEMPT_LIMITS), Content()
            self._most_bytes = most_bytes = self._create(1, head, self._most)
            self._last += 1
            self._first_recent = self._last
        self._is_most_due = True  # also after an error: while a store fails, this limits the memory
        recent_bytes = self._create(self._first_recent, head, self._recent)
        # Lists of runs, and those who follow one, read the part of recent content: it is small.
        self._is_most_due = recent_bytes > max(_RECENT_BYTES, self._most_bytes // _RECENT_SHARE)
        return recent_bytes + most_bytes

    def _create(self, first: int, head: Mapping[str, Any], content: Content) -> int:
        """Create the part from `first` on, under a name that no try had before; return its bytes."""
        part = PartRange(self.attempt, first, self._last)
        raw = encode_part(Part(part, head, content))
        self._files.append(part)  # an error does not say that it does not exist
        self._storage.create(f"{self._folder}/{part.file_name}", raw)
        # Not those that this part replaces: a reader that has just listed them has until the next write.
        for old in self._replaced:
            with suppress(DatasvcError):  # it stays, and readers ignore it
                self._storage.delete_if_older(f"{self._folder}/{old.file_name}", math.inf)
        self._replaced = [old for old in self._files if old.first >= first and old != part]
        self._files = [old for old in self._files if old not in self._replaced]
        return len(raw)
