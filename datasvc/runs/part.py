"""Parts: the files of a run log. A part never changes; it is created whole, and has a checksum.

A writer numbers its parts. Several consecutive parts are replaced by one *merged* part with fewer bins: it is created
before the parts that it replaces are deleted, so readers find every event at any time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository.objects.objects import digest_of
from datasvc.runs.content import Content
from datasvc.runs.facts import RunEvent
from datasvc.runs.step_table import StepTable

PART_FORMAT: Final = 1
MAX_PART_BYTES: Final = 64 << 20
_MAX_TIME_S: Final = 1e11  # some 3,000 years; `time.localtime` takes it
_FILE_NAME: Final = re.compile(r"(\d{8,18})\.(\d{8,18})-(\d{8,18})\.jsonl")


@dataclass(frozen=True, order=True)
class PartRange:
    """Which parts of an attempt a file has: `first` to `last`, both included; numbers are from 1 on."""

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
    """Return the parts that have every event once, oldest first: merged parts instead of those that they replace."""
    ranges = [part for name in file_names if (part := PartRange.parse(name)) is not None]
    chosen: list[PartRange] = []
    for part in sorted(ranges, key=lambda part: (part.attempt, part.first, -part.last)):
        if not chosen or part.attempt > chosen[-1].attempt or part.first > chosen[-1].last:
            chosen.append(part)
    return chosen


@dataclass(frozen=True)
class Part:
    """A part: its range, the state of the run when it was written, and its content.

    `head` has what the list of runs needs (docs/reference/formats.md); a merged part has the head of its newest part.
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
    lines += [event.to_json() for event in part.content.events]
    body = b"".join(_line(line) for line in lines)
    return body + _line({"checksum": digest_of(body)})


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


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


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
