"""Pins: named sets of objects that are not evicted until they are unpinned. Each pin is a JSON file in `CACHE/pins/`.

The files survive a rebuild of the catalogue, which reads the pins from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
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
    """A named set of objects that are not evicted.

    Attributes:
        name: name of the pin, such as "pets@3".
        objects: size in bytes by digest.
    """

    name: str
    objects: Mapping[Digest, int]

    @property
    def size_bytes(self) -> int:
        """Total size of the objects."""
        return sum(self.objects.values())


def changing_pin(folder: Path, name: str) -> AbstractContextManager[None]:
    """Lock a pin for changes inside the block, after waiting for other changes of this pin. Raises OSError."""
    # 60 bits of the name's digest choose the byte to lock. Two names that share a byte only wait for each other.
    return locked_byte(folder / "lock", int(digest_of(name.encode())[:15], 16))


def write_pin(folder: Path, pin: Pin) -> None:
    """Write a pin; it replaces a pin of the same name. Raises OSError."""
    durable.write_file(_path(folder, pin.name), json.dumps({"name": pin.name, "objects": pin.objects}).encode())


def read_pins(folder: Path) -> dict[str, Pin]:
    """Return every pin by name. Raises CorruptDataError if a file is damaged."""
    pins = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            name = str(content["name"])
            objects = {parse_digest(digest): int(size) for digest, size in content["objects"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, CorruptDataError) as error:
            raise CorruptDataError(f"the pin {path} is damaged: {error!r}; remove the file and pin again") from error
        pins[name] = Pin(name, objects)
    return pins


def remove_pin(folder: Path, name: str) -> None:
    """Remove a pin if it exists."""
    _path(folder, name).unlink(missing_ok=True)


def find_pin(folder: Path, name: str) -> Pin:
    """Return a pin. Raises NotFoundError if there is none with that name."""
    pins = read_pins(folder)
    if name not in pins:
        pin_names = ", ".join(sorted(pins)) or "none"
        raise NotFoundError(f"nothing is pinned as {name!r}; existing pins: {pin_names}")
    return pins[name]


def _path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe='@')}.json"
