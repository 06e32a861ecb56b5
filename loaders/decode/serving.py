"""What a node with `datasvc serve --decode-threads` does: decodes images that loaders of other machines send.

The pixels that it returns are those before flips, colours and normalisation, which are the loader's work: a byte per
value, and nothing in them depends on the epoch beyond the window. See `servers` for the loader's side.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, get_args

import numpy as np

from datasvc.errors import BadSampleError, ConfigError, UnavailableError
from datasvc.extras import explain_missing
from datasvc.loaders.decode.backend import Backend, Framework
from datasvc.loaders.decode.pixels import PixelFormat, Pixels
from datasvc.loaders.decode.reduced import DecodeScale, parse_decode_scale
from datasvc.loaders.decode.worker import ImageWorker
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.images.header import read_header

MAX_REQUEST_BYTES: Final = 64 << 20
MAX_HEAD_BYTES: Final = 64 << 10
MAX_IMAGES: Final = 64
# A larger image is left to the loader: a PNG of some kB may take gigabytes.
MAX_PIXELS: Final = 64 << 20
_IMAGES_PER_TASK: Final = 2
_MAX_SIZE: Final = 4096
_MAX_ANSWER_BYTES: Final = 256 << 20
_MAX_REASON: Final = 500  # characters
_STOPPING: Final = "this node is stopping; use another one"
_LENGTH: Final = struct.Struct("<I")
_PACKAGES: Final = {
    "datasvc": ("datasvc",),
    "nvImageCodec": ("nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13"),
    "Pillow": ("Pillow",),
    "torch": ("torch",),
}
_MAX_NUMBER: Final = 1 << 31


@dataclass(frozen=True)
class EncodedImage:
    """An image to decode; for the fields see `ImageWorker.scale`."""

    blob: Bytes
    start: Sequence[int]
    shape: Sequence[int]
    box: Sequence[float] | None = None
    region: Sequence[float] | None = None


@dataclass(frozen=True)
class Decoder:
    """How images are decoded; for the fields see `ImageWorker`."""

    size: int
    backend: Backend
    framework: Framework
    decode_scale: DecodeScale = "full"

    def make_worker(self) -> ImageWorker:
        """Return a worker for one thread, which only scales images."""
        return ImageWorker(
            PixelFormat("uint8"),
            self.size,
            backend=self.backend,
            framework=self.framework,
            decode_scale=self.decode_scale,
        )


def pack_request(decoder: Decoder, images: Sequence[EncodedImage]) -> list[memoryview | bytes]:
    """Return the body of a request in parts: length of the head, `uint32`; the head, JSON; the encoded images."""
    rows = [[len(image.blob), image.start, image.shape, image.box, image.region] for image in images]
    head = json.dumps({**vars(decoder), "images": rows}).encode()
    return [_LENGTH.pack(len(head)), head, *(image.blob.data for image in images)]


def parse_request(body: bytes) -> tuple[Decoder, list[EncodedImage]]:
    """Return the content of the body of a request. Raises ConfigError: it is not valid, or asks for too much."""
    try:
        decoder, images = _read_request(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, struct.error) as error:
        raise ConfigError(
            f"the request is not one to decode images ({str(error)[:200]}); loader and node need one release"
        ) from error
    if decoder.size > _MAX_SIZE or len(images) * decoder.size**2 * 3 > _MAX_ANSWER_BYTES:
        raise ConfigError(
            f"a request asks for images of a size of at most {_MAX_SIZE}, with pixels of at most {_MAX_ANSWER_BYTES} "
            "bytes together"
        )
    return decoder, images


def _read_request(body: bytes) -> tuple[Decoder, list[EncodedImage]]:
    head, position = _split(body)
    rows = head.pop("images")
    if not isinstance(rows, list) or len(rows) > MAX_IMAGES:
        raise ValueError(f"it has no list of at most {MAX_IMAGES} images")
    decoder = Decoder(**head)
    _check_numbers([decoder.size], int, 1, lowest=1)
    if decoder.backend not in ("cpu", "pillow") or decoder.framework not in get_args(Framework):
        raise ValueError("its decoder is unknown")
    parse_decode_scale(decoder.decode_scale)
    content, images = np.frombuffer(body, np.uint8), []
    for size_bytes, start, shape, box, region in rows:
        _check_numbers([size_bytes], int, 1, lowest=0)
        _check_numbers(start, int, 2)
        _check_numbers(shape, int, 2)
        if box is not None:
            _check_numbers(box, float, 4)
        if region is not None:
            _check_numbers(region, float, 6)
        images.append(EncodedImage(content[position : position + size_bytes], start, shape, box, region))
        position += size_bytes
    if position != len(body):
        raise ValueError("its images have other sizes")
    return decoder, images


def _check_numbers(values: Any, kind: type, count: int, *, lowest: int = -_MAX_NUMBER) -> None:
    """Raise ValueError unless `values` is a list of so many numbers of a kind, from `lowest` to `_MAX_NUMBER`."""
    has_kind = isinstance(values, list) and all(type(value) is kind for value in values)
    if not has_kind or len(values) != count or not all(lowest <= value <= _MAX_NUMBER for value in values):
        raise ValueError(f"{str(values)[:80]} is not a list of {count} numbers in their range")


def pack_answer(pixels: Pixels, bad: dict[int, str], instance: str) -> bytes:
    """Return an answer: length of the head, `uint32`; the head, JSON; the pixels `uint8[n, size, size, 3]`."""
    named = {str(index): reason for index, reason in bad.items()}
    head = json.dumps({"bad": named, "instance": instance}).encode()
    return b"".join([_LENGTH.pack(len(head)), head, pixels.data])


def parse_answer(body: bytes, count: int, size: int) -> tuple[Pixels, dict[int, str], str]:
    """Return the pixels of `count` images of an answer; which could not be decoded: index -> reason; and who answers.

    Raises:
        ValueError: the body is not the answer to a request of so many images.
    """
    try:
        head, position = _split(body)
        bad = {int(index): str(reason) for index, reason in head["bad"].items()}
        pixels = np.frombuffer(body, np.uint8, offset=position).reshape(count, size, size, 3)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"its answer is not one of decoded images: {str(error)[:200]}") from error
    if not bad.keys() <= set(range(count)):
        raise ValueError("its answer names images that were not sent")
    return pixels, bad, str(head.get("instance"))


def find_versions() -> dict[str, str | None]:
    """Return the versions of the packages that pixels depend on; None for one that is not installed."""
    return {name: _version(names) for name, names in _PACKAGES.items()}


@cache  # each new connection asks for them
def _version(names: Sequence[str]) -> str | None:
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name).partition("+")[0]  # builds for a CPU and for CUDA scale alike on a CPU
    return None


class DecodeServer:
    """Decodes requests in `num_threads` threads; the images of a request are divided among them.

    Attributes:
        num_threads: number of threads.
        num_images: images decoded so far.
        instance: random text, by which a loader notices that another server answers than the one that it has checked.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads, self.num_images = num_threads, 0
        self.instance = secrets.token_hex(8)
        self._num_busy, self._is_stopped = 0, False  # tasks in progress; whether they end after their current image
        self._changed = threading.Condition()
        self._making = threading.Lock()
        self._thread_local = threading.local()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="datasvc-decode-server")

    async def answer(self, body: bytes) -> bytes:
        """Return the answer to the body of a request.

        Raises:
            ConfigError: the request is not valid, or this machine lacks what it needs.
            UnavailableError: the server is stopping.
        """
        decoder, images = parse_request(body)
        pixels = np.zeros((len(images), decoder.size, decoder.size, 3), np.uint8)
        tasks = [
            range(start, min(start + _IMAGES_PER_TASK, len(images)))
            for start in range(0, len(images), _IMAGES_PER_TASK)
        ]
        run = asyncio.get_running_loop().run_in_executor
        try:
            parts = await asyncio.gather(
                *(run(self._pool, self._decode, decoder, images, pixels, task) for task in tasks)
            )
        except RuntimeError as error:  # of a pool that was shut down
            raise UnavailableError(_STOPPING) from error
        self.num_images += len(images)
        bad = {index: reason for part in parts for index, reason in part.items()}
        return pack_answer(pixels, bad, self.instance)

    def describe(self) -> dict[str, Any]:
        """Return the attributes, and the versions that pixels depend on, as JSON values."""
        numbers = {"num_threads": self.num_threads, "num_images": self.num_images}
        return {**numbers, "instance": self.instance, "versions": find_versions()}

    def close(self, timeout_s: float) -> bool:
        """Stop each thread after its current image; return whether all have ended within a time."""
        self._is_stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_busy, timeout_s)

    def _decode(
        self, decoder: Decoder, images: Sequence[EncodedImage], pixels: Pixels, task: range
    ) -> dict[int, str]:
        """Decode some images of a request; return those that cannot be decoded here: index -> reason."""
        bad: dict[int, str] = {}
        with self._changed:
            self._num_busy += 1
        try:
            worker = self._worker(decoder)
            for index in task:
                if self._is_stopped:
                    raise UnavailableError(_STOPPING)
                try:
                    pixels[index] = self._scale(worker, images[index])
                except BadSampleError as error:
                    bad[index] = str(error)[:_MAX_REASON]
                except (ValueError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
                    bad[index] = f"{type(error).__name__}: {error}"[:_MAX_REASON]
        finally:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()
        return bad

    def _scale(self, worker: ImageWorker, image: EncodedImage) -> Pixels:
        header = read_header(image.blob.data)
        if header.width * header.height > MAX_PIXELS:
            raise BadSampleError(f"is {header.width}x{header.height} pixels, too large for a decode server")
        return worker.scale(image.blob, image.start, image.shape, box=image.box, region=image.region)

    def _worker(self, decoder: Decoder) -> ImageWorker:
        """Return the calling thread's worker. It keeps one, because workers of large images have large buffers."""
        if getattr(self._thread_local, "decoder", None) != decoder:
            # One at a time: parallel imports may get an incomplete module.
            with self._making, explain_missing("a decode server for loaders that yield tensors"):
                self._thread_local.worker = decoder.make_worker()
            self._thread_local.decoder = decoder
        worker: ImageWorker = self._thread_local.worker
        return worker


def _split(body: bytes) -> tuple[dict[str, Any], int]:
    """Return the head of a body, and where the bytes after it begin."""
    (length,) = _LENGTH.unpack_from(body)
    stop = _LENGTH.size + length
    if length > MAX_HEAD_BYTES:
        raise ValueError(f"its head has {length} bytes")
    head = json.loads(body[_LENGTH.size : stop])
    if len(body) < stop or not isinstance(head, dict):
        raise ValueError("it has no head")
    return head, stop
