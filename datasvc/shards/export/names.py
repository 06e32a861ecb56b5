"""File names out of keys: any key gives a name below the destination, and two keys never give one name.

What a file system, a URL or a shell could misread is percent-encoded, byte by byte of its UTF-8. A `%` that is not
followed by two hex digits marks what has no other name: an empty part, and what was cut for its length.
"""

from __future__ import annotations

import re
from typing import Any, Final

from blake3 import blake3

_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f%/\\:*?"<>|]|^\.|[. ]$')
# File systems take 255 bytes for a name; an extension is still to come.
_MAX_PART_BYTES: Final = 200
_MAX_PATH_BYTES: Final = 1000
# Of a name that is cut: legible, and short enough with three bytes for each.
_KEPT_BYTES: Final = 50
_MAGIC: Final = {b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n": "png", b"GIF8": "gif", b"BM": "bmp"}
_SPELLINGS: Final = {
    "jpg": ("jpg", "jpeg", "jpe"),
    "png": ("png",),
    "gif": ("gif",),
    "bmp": ("bmp",),
    "webp": ("webp",),
    "tif": ("tif", "tiff"),
}


def safe_part(text: str) -> str:
    """Return `text` as one part of a path: no folder, not hidden, 200 bytes at most."""
    return _cut(_UNSAFE.sub(percent_encoded, text) or "%", _MAX_PART_BYTES)


def safe_path(key: str) -> str:
    """Return a key as a relative path; its slashes make folders, everything else is as `safe_part` says."""
    return _cut("/".join(safe_part(part) for part in key.split("/")), _MAX_PATH_BYTES)


def percent_encoded(match: re.Match[str]) -> str:
    """Return the bytes of a match as %XX."""
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def image_extension(blob: Any) -> str | None:
    """Return the extension that belongs to an encoded image, "jpg"; None where `blob` starts like none."""
    start = bytes(memoryview(blob)[:16])
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "webp"
    if start[:4] in {b"II*\0", b"MM\0*"}:
        return "tif"
    return next((extension for magic, extension in _MAGIC.items() if start.startswith(magic)), None)


def split_extension(key: str, extension: str | None) -> tuple[str, str]:
    """Return a key as stem and own extension, which counts only where it spells `extension` in some way.

    `("a/1.JPEG", "jpg")` gives `("a/1", "JPEG")`; `("a/1.0", "jpg")` gives `("a/1.0", "")`.
    """
    stem, dot, own = key.rpartition(".")
    base = stem.rpartition("/")[2]
    if dot and base and extension is not None and own.lower() in _SPELLINGS[extension]:
        return stem, own
    return key, ""


def _cut(name: str, limit_bytes: int) -> str:
    raw = name.encode()
    if len(raw) <= limit_bytes:
        return name
    kept = raw[:_KEPT_BYTES].decode(errors="ignore").replace("/", "%2F")
    # An escape that the cut has halved would read as a mark.
    return f"{re.sub('%[0-9A-F]?$', '', kept)}%~{blake3(raw).hexdigest(16)}"
