"""The message that a rank sends to all others in one cycle, and its encoding.

The encoding is JSON, not pickle. It is compact enough, because a cached request is sent as its number in the request
cache, and an empty message has no bytes. The message is a list: is_leaving and entries, followed by failure and
tuning if at least one of them is set.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass

from datasvc.trainer.engine.negotiation.requests import Request, request_fields, request_from_fields


@dataclass(frozen=True, slots=True)
class Tuning:
    """Values of engine settings. All ranks adopt them at the end of the cycle in which rank 0 sends them."""

    fusion_bytes: int
    cycle_time_s: float
    is_hierarchical: bool = False


@dataclass(frozen=True, slots=True)
class CycleMessage:
    """The message of one rank in one cycle.

    Attributes:
        entries: new submissions in order, each as a request or as its number in the cache.
        is_leaving: whether the rank leaves the job after this cycle, as after `shutdown`.
        failure: reason why the job cannot continue; empty if it can.
        tuning: values that all ranks adopt; None for no change. Only those of rank 0 are used.
    """

    entries: tuple[Request | int, ...] = ()
    is_leaving: bool = False
    failure: str = ""
    tuning: Tuning | None = None


def encode_message(message: CycleMessage) -> bytes:
    """Return the bytes of a message; no bytes for an empty message."""
    # Most messages of an idle job are empty. They are sent without bytes, so that no rank has to parse JSON.
    if message == CycleMessage():
        return b""
    entries = [entry if isinstance(entry, int) else request_fields(entry) for entry in message.entries]
    fields = [int(message.is_leaving), entries]
    if message.failure or message.tuning:
        tuning = message.tuning
        fields += [message.failure, astuple(tuning) if tuning else None]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_message(data: bytes) -> CycleMessage:
    """Return the message for bytes from `encode_message`."""
    if not data:
        return CycleMessage()
    # `encode_message` leaves out the last two fields if both are empty.
    is_leaving, entries, *optional = json.loads(data)
    failure, tuning = optional or ("", None)
    decoded = tuple(entry if isinstance(entry, int) else request_from_fields(entry) for entry in entries)
    return CycleMessage(decoded, bool(is_leaving), failure, None if tuning is None else Tuning(*tuning))
