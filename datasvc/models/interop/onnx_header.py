"""Reads the opset of an ONNX file without the package onnx, and without its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, Final

# Numbers of the fields of `ModelProto` and `OperatorSetIdProto` in onnx.proto.
_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _OPSET = 1, 2, 3, 8
_DOMAIN, _VERSION = 1, 2
_MAX_FIELD_BYTES: Final = 4096
_MAX_FIELDS: Final = 10_000
_DEFAULT_DOMAINS: Final = ("", "ai.onnx")


def read_onnx_details(path: Path) -> dict[str, Any]:
    """Return `opset` (of the default domain), `ir_version` and `producer` of a file, as far as it has them.

    A file that is not ONNX gives {}. Raises OSError: the file cannot be read.
    """
    details: dict[str, Any] = {}
    with path.open("rb") as file:
        try:
            fields = list(_fields(file, path.stat().st_size, (_PRODUCER, _PRODUCER_VERSION, _OPSET)))
            producer = [value.decode() for number, value in fields if number in (_PRODUCER, _PRODUCER_VERSION)]
            for number, value in fields:
                if number == _OPSET:
                    opset = dict(_parse(value))
                    if opset.get(_DOMAIN, b"").decode() in _DEFAULT_DOMAINS and _VERSION in opset:
                        details["opset"] = opset[_VERSION]
                elif number == _IR_VERSION:
                    details["ir_version"] = value
        except (ValueError, TypeError, AttributeError):
            return {}
    # A file of another format may look like some of these fields.
    if "opset" not in details or "ir_version" not in details:
        return {}
    return details | ({"producer": " ".join(filter(None, producer))} if any(producer) else {})


def _parse(message: bytes) -> Iterator[tuple[int, Any]]:
    import io

    yield from _fields(io.BytesIO(message), len(message), (_DOMAIN,))


def _fields(file: IO[bytes], stop: int, texts: Collection[int]) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the integers, and of the short texts and messages in `texts`, of a protobuf message.

    Raises ValueError: the bytes are not a protobuf message.
    """
    for _ in range(_MAX_FIELDS):
        if file.tell() >= stop:
            return
        key = _varint(file)
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, _varint(file)
        elif kind == 2:
            length = _varint(file)
            if file.tell() + length > stop:
                raise ValueError("a field extends beyond the file")
            if number in texts and length <= _MAX_FIELD_BYTES:
                yield number, file.read(length)
            else:
                file.seek(length, 1)  # the graph, which has the weights
        elif kind in (1, 5):
            file.seek(8 if kind == 1 else 4, 1)
        else:
            raise ValueError(f"{kind} is not a kind of field")
    raise ValueError("too many fields")


def _varint(file: IO[bytes]) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)
        if not byte:
            raise ValueError("the file ends inside a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError("a number has more than 64 bits")
