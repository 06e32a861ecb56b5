"""Pins: what shall stay on a node until somebody says otherwise. One file each: they outlive the catalogue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from datasvc import durable
from datasvc.cache.catalogue.object_locks import locked_byte
from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.repository import Digest
from datasvc.repository.objects.objects import digest_of, parse_digest


@dataclass(frozen=True)
class Pin:
    """Objects that stay.

    Attributes:
        name: what was pinned, such as "pets@3".
        objects: size in bytes by digest.
    """

    name: str
    objects: Mapping[Digest, int]

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(self.objects.values())


@contextmanager
def changing_pin(folder: Path, name: str) -> Iterator[None]:
    """Be the only one who changes the pins of a name; waits for whoever does. Raises OSError."""
    # 60 bits of a digest: two names that share a byte would only wait for each other.
    with locked_byte(folder / "lock", int(digest_of(name.encode())[:15], 16)):
        yield


def write_pin(folder: Path, pin: Pin) -> None:
    """Publish a pin in place of one of the same name. Raises OSError."""
    durable.write_file(_path(folder, pin.name), json.dumps({"name": pin.name, "objects": pin.objects}).encode())


def read_pins(folder: Path) -> dict[str, Pin]:
    """Return every pin by name. Raises CorruptDataError."""
    pins = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            pin = Pin(
                str(content["name"]), {parse_digest(digest): int(size) for digest, size in content["objects"].items()}
            )
        except (KeyError, TypeError, ValueError, AttributeError, CorruptDataError) as error:
            raise CorruptDataError(f"{path} is damaged: {error!r}; remove it and pin again") from error
        pins[pin.name] = pin
    return pins


def remove_pin(folder: Path, name: str) -> None:
    """Remove a pin, if it is there."""
    _path(folder, name).unlink(missing_ok=True)


def find_pin(folder: Path, name: str) -> Pin:
    """Return a pin. Raises NotFoundError: none has that name."""
    pins = read_pins(folder)
    if name not in pins:
        known = ", ".join(sorted(pins)) or "nothing"
        raise NotFoundError(f"nothing is pinned as {name!r}; pinned is: {known}")
    return pins[name]


def _path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe='@')}.json"
