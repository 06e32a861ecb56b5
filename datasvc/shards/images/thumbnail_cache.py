"""Thumbnails of images for the pages, re-encoded and cached on the local disk.

A page never gets the bytes of a sample: every image is decoded here and encoded again, or replaced by a drawn
placeholder that says why it cannot be shown. The cache is bounded. Several processes may use its folder at once:
files are published atomically, and a file that is damaged or gone is made again.
"""

from __future__ import annotations

import io
import os
import textwrap
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3
from PIL import Image, ImageDraw

from datasvc import durable
from datasvc.errors import BadSampleError
from datasvc.repository import Digest, Repository
from datasvc.repository.logs.redactions import redaction_log
from datasvc.shards.images.thumbnail import thumbnail

DEFAULT_FOLDER: Final = Path.home() / ".cache" / "datasvc" / "thumbnails"
MAX_SIDE: Final = 256  # pixels
_MAX_PIXELS: Final = 32 << 20  # to decode: 100 MB as RGB
_MAX_CACHE_BYTES: Final = 256 << 20
_SWEEP_BYTES: Final = 8 << 20  # a process makes room each time it has written so much
_FORMAT: Final = b"thumbnail 1\n"  # change it if the same image would give another thumbnail
_START, _STOP = b"\xff\xd8", b"\xff\xd9"  # of a JPEG
# Two images are decoded at once, so that a page of large ones takes no more memory than two of them.
_decoding = threading.Semaphore(2)


class ThumbnailCache:
    """JPEG files of at most 256 pixels, in a folder.

    Args:
        folder: folder of the cache; created at the first write.
        max_bytes: size of the cache; the least recently used files are removed first.
    """

    def __init__(self, folder: Path, max_bytes: int = _MAX_CACHE_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._written_bytes = 0

    def get(self, name: str, read: Callable[[], bytes | None]) -> bytes:
        """Return a thumbnail as JPEG.

        Args:
            name: identifies the encoded image for ever, such as the digest of its shard with row and column.
            read: returns the encoded image, None for a null; called only if the cache does not have the thumbnail.
                Its errors are raised.
        """
        path = self._path(name)
        with suppress(OSError):
            content = path.read_bytes()
            # Files are not synced, so a power cut may leave an incomplete one.
            if content.startswith(_START) and content.endswith(_STOP):
                with suppress(OSError):  # a folder that cannot be written is a cache all the same
                    os.utime(path)
                return content
        content = make_thumbnail(read())
        # Without a cache, such as on a full disk, thumbnails are only slower.
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # pictures of data that others may not read
            path.parent.mkdir(exist_ok=True)
            durable.write_file(path, content, synced=False)
            self._written_bytes += len(content)
            if self._written_bytes > min(_SWEEP_BYTES, self._max_bytes // 2):
                self._written_bytes = 0
                self._sweep()
        return content

    def remove(self, name: str) -> bool:
        """Remove a thumbnail, such as that of a purged sample; return whether there was one. Raises OSError."""
        path = self._path(name)
        existed = path.exists()
        path.unlink(missing_ok=True)
        return existed

    def _path(self, name: str) -> Path:
        digits = blake3(_FORMAT + name.encode()).hexdigest()
        return self._folder / digits[:2] / f"{digits[2:]}.jpg"

    def _sweep(self) -> None:
        """Remove the least recently used files until the cache is 20 % below its size, so that sweeps are rare."""
        found = []
        for path in self._folder.glob("*/*.jpg"):
            with suppress(OSError):  # another process removed it
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        size_bytes = sum(size for _, size, _ in found)
        if size_bytes <= self._max_bytes:
            return
        for _, size, path in sorted(found):
            if size_bytes <= self._max_bytes * 4 // 5:
                return
            path.unlink(missing_ok=True)
            size_bytes -= size


def remove_purged(repository: Repository, columns: Collection[str]) -> int:
    """Remove the thumbnails in the default folder of all purged samples of a repository; return their number.

    `columns` are the image columns. Raises what `RedactionLog.read` raises.
    """
    cache = ThumbnailCache(DEFAULT_FOLDER)
    return sum(
        cache.remove(image_name(repository, each.old_index, each.old, row, column))
        for each in redaction_log(repository.objects).read().by_shard.values()
        for row in each.payloads
        for column in columns
    )


def image_name(repository: Repository, index: Digest | None, shard: Digest, row: int, column: str) -> str:
    """Return the permanent name of an encoded image: repository, digests of index and shard, row and column.

    Pages read parts of shards and compare them with the sample index, not with the digest of the shard. Another
    repository may have made an index of its own for a shard of this one, and must not replace its pictures.
    """
    return f"{repository.storage.url} {index} {shard} {row} {column}"


def make_thumbnail(encoded: bytes | None, max_side: int = MAX_SIDE) -> bytes:
    """Return an encoded image as JPEG of at most `max_side` pixels; if it cannot be shown, a picture of why."""
    if not encoded:
        reason = "its value is null" if encoded is None else "its value is empty, as that of a purged sample"
        return _placeholder("no image", reason)
    try:
        with _decoding:
            small = thumbnail(encoded, max_side, max_pixels=_MAX_PIXELS)
    except BadSampleError as error:
        return _placeholder("damaged image", str(error))
    return _encode(small)


def _placeholder(title: str, reason: str) -> bytes:
    image = Image.new("RGB", (MAX_SIDE, MAX_SIDE), "#e8e8e8")
    draw = ImageDraw.Draw(image)
    draw.line((0, 0, MAX_SIDE, MAX_SIDE), fill="#cccccc", width=2)
    draw.line((0, MAX_SIDE, MAX_SIDE, 0), fill="#cccccc", width=2)
    # The built-in font has ASCII only.
    printable = reason.encode("ascii", "replace").decode()
    lines = [title, *textwrap.wrap(printable, 36, max_lines=6, placeholder=" ...")]
    draw.multiline_text((16, 80), "\n".join(lines), fill="#7a0000", spacing=6)
    return _encode(image)


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
