"""What a rank tells all others in one cycle, and its bytes.

JSON, no pickle: compact enough, because a request seen before travels as its number in the request cache, and
a rank with nothing to say sends no bytes at all.
"""

import json
from dataclasses import dataclass

from trainer.engine.requests import Request, request_fields, request_from_fields


@dataclass(frozen=True, slots=True)
class CycleMessage:
    """One rank's new submissions in order, each a request or its cache number; and whether it leaves."""

    entries: tuple[Request | int, ...] = ()
    is_leaving: bool = False


def encode_message(message: CycleMessage) -> bytes:
    """The message's bytes; none for a message that says nothing."""
    if not message.entries and not message.is_leaving:
        return b""
    entries = [entry if isinstance(entry, int) else request_fields(entry) for entry in message.entries]
    return json.dumps([int(message.is_leaving), entries], separators=(",", ":")).encode()


def decode_message(data: bytes) -> CycleMessage:
    """The inverse of ``encode_message``."""
    if not data:
        return CycleMessage()
    is_leaving, entries = json.loads(data)
    decoded = tuple(entry if isinstance(entry, int) else request_from_fields(entry) for entry in entries)
    return CycleMessage(decoded, bool(is_leaving))
