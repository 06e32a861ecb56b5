"""What a rank tells all others in one cycle, and its bytes.

JSON, no pickle: compact enough, because a request seen before travels as its number in the request cache, and
a rank with nothing to say sends no bytes at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from datasvc.trainer.engine.negotiation.requests import Request, request_fields, request_from_fields


@dataclass(frozen=True, slots=True)
class Tuning:
    """How to pace and fuse from the next cycle on."""

    fusion_bytes: int
    cycle_time_s: float


@dataclass(frozen=True, slots=True)
class CycleMessage:
    """What one rank says.

    Attributes:
        entries: its new submissions in order, each a request or its cache number.
        is_leaving: it takes no part in the next cycle.
        complaint: why the job cannot go on; empty if it can.
        tuning: what all shall change to; rank 0's holds.
    """

    entries: tuple[Request | int, ...] = ()
    is_leaving: bool = False
    complaint: str = ""
    tuning: Tuning | None = None


def encode_message(message: CycleMessage) -> bytes:
    """The message's bytes; none for a message that says nothing."""
    if message == CycleMessage():
        return b""
    entries = [entry if isinstance(entry, int) else request_fields(entry) for entry in message.entries]
    fields = [int(message.is_leaving), entries]
    if message.complaint or message.tuning:
        tuning = message.tuning
        fields += [message.complaint, [tuning.fusion_bytes, tuning.cycle_time_s] if tuning else None]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_message(data: bytes) -> CycleMessage:
    """The inverse of `encode_message`."""
    if not data:
        return CycleMessage()
    is_leaving, entries, *rest = json.loads(data)
    complaint, tuning = rest or ("", None)
    decoded = tuple(entry if isinstance(entry, int) else request_from_fields(entry) for entry in entries)
    return CycleMessage(decoded, bool(is_leaving), complaint, None if tuning is None else Tuning(*tuning))
