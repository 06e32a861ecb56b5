"""Facts of events: any values that a program reports, as JSON values of limited size."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from datasvc.repository.objects.objects import digest_of

MAX_EVENT_BYTES: Final = 64 << 10
_MAX_TEXT: Final = 4096
_MAX_ITEMS: Final = 1000
_MAX_DEPTH: Final = 8
_MAX_NAME: Final = 128
_MAX_WHOLE_NAME: Final = 1 << 16


@dataclass(frozen=True)
class RunEvent:
    """One event of a run.

    Attributes:
        time_s: when it was reported, in seconds since 1970, by the clock of the machine that reported it.
        event: its name, such as "checkpoint". Any program may choose any text: escape it before you show it.
        facts: JSON values by name; a number that is not finite is text.
        attempt: number of the attempt of the run that reported it, from 1 on.
    """

    time_s: float
    event: str
    facts: Mapping[str, Any]
    attempt: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the event as JSON values, without its attempt."""
        return {"time": round(self.time_s, 3), "event": self.event, "facts": dict(self.facts)}

    @cached_property
    def _line(self) -> bytes:
        # Made once: a part with the event is written again and again while it grows.
        return encode_line(self.to_json())


def encode_line(value: Mapping[str, Any]) -> bytes:
    """Return a line of a part."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def encode_event(event: RunEvent) -> bytes:
    """Return the line of an event."""
    return event._line  # noqa: SLF001 - not for users


def make_event(time_s: float, event: object, facts: Mapping[str, Any]) -> RunEvent:
    """Return an event whose facts are JSON values of limited size, whatever a program has passed."""
    return RunEvent(time_s, to_name(event), limit_size(to_json_value(facts), MAX_EVENT_BYTES))


def limit_size(value: Any, max_bytes: int) -> Any:
    """Return a JSON value, or a note of its size if it needs more than `max_bytes` of JSON."""
    size_bytes = len(json.dumps(value))
    return value if size_bytes <= max_bytes else {"left_out_bytes": size_bytes}


def choose_facts(facts: Mapping[str, Any], first: Collection[str], max_bytes: int) -> dict[str, Any]:
    """Return the facts as JSON values that fit into `max_bytes` of JSON, those named in `first` before others."""
    ordered = sorted(facts, key=lambda name: name not in first)
    whole = {to_name(name): to_json_value(facts[name]) for name in ordered}
    if len(json.dumps(whole)) <= max_bytes:
        return whole
    chosen: dict[str, Any] = {}
    room_bytes = max_bytes
    for name, value in whole.items():
        fact = {name: value}
        size_bytes = len(json.dumps(fact))
        if size_bytes <= room_bytes:
            chosen |= fact
            room_bytes -= size_bytes
    return chosen


def to_number(value: Any) -> float | None:
    """Return a number as a float; None for other values. A boolean is no number, a tensor of one number is one."""
    if isinstance(value, float):
        return value
    # Every step has some of these, and the check of an abstract class below takes ten times as long.
    if type(value) is int:
        return _to_float(value)
    if value is None or isinstance(value, str):
        return None
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of numpy, torch or another framework
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return _to_float(value)


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def to_json_value(value: Any, depth: int = 0) -> Any:
    """Return `value` as a JSON value: long texts and lists are cut, and other objects become text. Never fails."""
    try:
        return _to_json_value(value, depth)
    except Exception:  # noqa: BLE001 - methods of a user's class, or a dict that changes meanwhile
        return to_text(value, _MAX_TEXT)


def _to_json_value(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:  # a seed may have 64 bits: a float would round it
        return int(value)
    number = to_number(value)
    if number is not None:
        return number if math.isfinite(number) else repr(number)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        items = list(value.items())[:_MAX_ITEMS]
        return {to_name(name): to_json_value(item, depth + 1) for name, item in items}
    if isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes) and depth < _MAX_DEPTH:
        return [to_json_value(item, depth + 1) for item in list(value)[:_MAX_ITEMS]]
    return to_text(value, _MAX_TEXT)


def to_name(value: object) -> str:
    """Return `value` as text of limited length: the name of an event or of a fact."""
    name = to_text(value, _MAX_WHOLE_NAME)
    # Two long names with the same start stay two names.
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 9]}~{digest_of(name.encode())[:8]}"


def to_text(value: object, max_length: int = _MAX_TEXT) -> str:
    """Return at most `max_length` characters of `value` as text that UTF-8 can encode."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:  # noqa: BLE001 - the method of a user's class; an event must not end its run
        text = f"<{type(value).__name__}>"
    return text[:max_length].encode("utf-8", "replace").decode()
