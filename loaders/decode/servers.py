"""Decode servers as a loader sees them: nodes that decode a part of its images, to the pixels that it gets itself.

The CPU backend has a thread per four threads of a server, beside its own. All take tasks from one queue, so a server
decodes as many images as it has time for. What a server does not decode, for whatever reason, is decoded here.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

import numpy as np
from PIL import Image

from datasvc.cache.peers.peer_source import PeerSettings, connect, tls_context
from datasvc.errors import ConfigError
from datasvc.loaders.decode.pixels import Pixels
from datasvc.loaders.decode.reduced import smallest_reduced
from datasvc.loaders.decode.serving import (
    MAX_HEAD_BYTES,
    MAX_PIXELS,
    Decoder,
    EncodedImage,
    find_versions,
    pack_request,
    parse_answer,
)
from datasvc.threads import count_processors

_LOG = logging.getLogger(__name__)
_ANSWER_S: Final = 10.0  # until an answer begins, and for each pause in it
_WHOLE_ANSWER_S: Final = 30.0
_CHUNK_BYTES: Final = 1 << 20
_THREADS_PER_CONNECTION: Final = 4
_BUSY_PAUSE: Final = 64  # tasks
# After a failure, a server gets no tasks until its threads have done so many here; each time twice as many.
_MIN_PAUSE: Final = 8
_MAX_THREADS: Final = 256  # of a server that a loader uses
_MAX_PAUSE: Final = 4096
_Decoded = tuple[Pixels, dict[int, str]]


class _RefusedConnectionError(ConnectionError):
    """The node has as many connections as it takes, or is about to stop."""


class _OtherServerError(ConnectionError):
    """Another server has answered than the one that was checked, as after a restart."""


class ServerConnection:
    """What one thread sends to a decode server, over one connection at a time."""

    def __init__(self, server: ServerOfLoader) -> None:
        self._server = server
        self._connection: http.client.HTTPConnection | None = None
        self._skip = 0  # tasks until this thread asks a busy server again

    def is_due(self) -> bool:
        """Return whether the next task may be sent. Then call `decode`; else decode it here."""
        self._skip = max(0, self._skip - 1)
        return not self._skip and self._server.is_due()

    def decode(self, images: Sequence[EncodedImage]) -> _Decoded | None:
        """Return the scaled pixels of images, `uint8[n, size, size, 3]`, and which are bad: index -> reason.

        None: the server does not decode them; decode them here.
        """
        is_reused = self._connection is not None
        try:
            try:
                decoded = self._send(images)
            except (ConnectionError, http.client.BadStatusLine) as error:
                is_other = isinstance(error, _OtherServerError)
                if not (is_reused or is_other) or isinstance(error, _RefusedConnectionError):
                    raise
                # A connection that is idle for long is closed by the server. That is no failure: connect again.
                if is_other:
                    self._server.distrust()
                decoded = self._send(images)
        except _RefusedConnectionError as error:
            self._skip = _BUSY_PAUSE
            self._server.record_busy(str(error))
            return None
        except (OSError, ValueError, http.client.HTTPException) as error:  # ConfigError is a ValueError
            self._server.record_failure(str(error) or type(error).__name__)
            return None
        except BaseException as error:
            self._server.record_failure(repr(error))
            raise
        self._server.record_success(len(images))
        return decoded

    def _send(self, images: Sequence[EncodedImage]) -> _Decoded:
        try:
            if self._connection is None or self._connection.sock is None:
                self._connection = self._server.connect()
            return self._server.decode(self._connection, images)
        except BaseException:
            if self._connection is not None:
                self._server.disconnect(self._connection)
                self._connection = None
            raise


class ServerOfLoader:
    """A decode server that the threads of one backend use.

    Args:
        url: URL of the node, http or https.
        decoder: how images are decoded, here as there.
        settings: token, certificates and time limits.

    Attributes:
        num_images: images that it has decoded.
        num_threads: number of its threads; until it answers, the number of processors here.

    Raises:
        ConfigError: the URL is not valid, the node refuses, or its pixels differ from those decoded here.
    """

    def __init__(self, url: str, decoder: Decoder, settings: PeerSettings) -> None:
        self._url, self._decoder, self._settings = url, decoder, settings
        self._tls = tls_context(settings.ca_file) if url.startswith("https:") else None
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._is_checked = self._is_closed = False
        # Whether it has failed, whether a thread tries it again, and tasks until one may: now, and after a failure.
        self._is_failing = self._is_trying = False
        self._skip, self._pause = 0, _MIN_PAUSE
        self._num_good = 0  # tasks since the last failure
        self._instance = ""  # of the server that was checked
        self.num_images, self.num_threads = 0, count_processors()
        try:
            self.disconnect(self.connect())
        except ConfigError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.record_failure(str(error) or type(error).__name__)

    @property
    def num_connections(self) -> int:
        """Number of connections that keep all its threads busy: each task is divided among several of them."""
        return -(-self.num_threads // _THREADS_PER_CONNECTION)

    def is_due(self) -> bool:
        """Return whether a thread may send to the server now; count the task if it must not."""
        with self._lock:
            if self._is_closed:
                return False
            if self._is_failing:
                self._skip = max(0, self._skip - 1)
                if self._skip or self._is_trying:
                    return False
                self._is_trying = True
            return True

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection. After a failure the server is checked first: it may have other software now.

        Raises:
            ConfigError: the node refuses, or its pixels differ from those decoded here.
            OSError, http.client.HTTPException, ValueError: the node does not answer.
        """
        with self._checking:
            if not self._is_checked:
                self._check()
                self._is_checked = True
        connection = self._connect()
        try:
            # A node refuses a connection too many at its first request. To one with a body, the answer may be lost.
            self._request(connection, "GET", [], MAX_HEAD_BYTES)
        except BaseException:
            self.disconnect(connection)
            raise
        if connection.sock is None:  # a proxy may take one request a connection
            self.disconnect(connection)
            connection = self._connect()
        connection.sock.settimeout(_ANSWER_S)
        return connection

    def disconnect(self, connection: http.client.HTTPConnection) -> None:
        """Close a connection."""
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def decode(self, connection: http.client.HTTPConnection, images: Sequence[EncodedImage]) -> _Decoded:
        """Let the server decode images; for the errors see `connect`."""
        pixels, bad, instance = self._exchange(connection, images)
        if instance != self._instance:
            raise _OtherServerError("another server answers at this address")
        return pixels, bad

    def distrust(self) -> None:
        """Check the server before the next connection."""
        self._is_checked = False

    def record_success(self, num_images: int) -> None:
        """Count images that the server has decoded."""
        with self._lock:
            was_failing = self._is_failing
            self._is_failing = self._is_trying = False
            self._num_good += 1
            # A server that fails again and again is used less and less.
            if self._num_good >= self._pause:
                self._pause = _MIN_PAUSE
            self.num_images += num_images
        if was_failing:
            _LOG.warning("decode server %s is used again", self._url)

    def record_busy(self, reason: str) -> None:
        """Record that the node refuses one more connection; the others go on."""
        with self._lock:
            if not self._is_trying:
                return
        self.record_failure(reason)

    def record_failure(self, reason: str) -> None:
        """Pause the use of the server; the first time, warn."""
        with self._lock:
            was_failing = self._is_failing
            if self._is_closed or (was_failing and not self._is_trying):
                return  # other threads had sent something too before the first of them failed
            self._skip, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
            self._is_failing, self._is_trying, self._is_checked = True, False, False
            self._num_good = 0
        if not was_failing:
            _LOG.warning(
                "decode server %s is not used: %s; its part is decoded here, and it is tried again", self._url, reason
            )

    def close(self) -> None:
        """Close all connections; a thread that waits for an answer then goes on, and no thread connects again."""
        with self._lock:
            self._is_closed = True
            connections = tuple(self._open)
            self._open.clear()
        for connection in connections:
            sock = connection.sock  # None if the server has closed it
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> http.client.HTTPConnection:
        connection = connect(self._url, self._settings, self._tls)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._open.add(connection)
        if is_closed:
            connection.close()
            raise ConnectionAbortedError("the loader is closed")
        return connection

    def _check(self) -> None:
        """Check that the node decodes images, to the pixels that this machine gets from them."""
        with self._one_request() as connection:
            answer = self._request(connection, "GET", [], MAX_HEAD_BYTES)
        try:
            facts = json.loads(answer)
            self.num_threads = min(max(1, int(facts["num_threads"])), _MAX_THREADS)
            theirs = {name: facts["versions"][name] for name in self._packages()}
        except (KeyError, TypeError, RecursionError, json.JSONDecodeError) as error:
            raise ConfigError(f"decode server {self._url} is not a node of datasvc: {error!r}") from error
        own = find_versions()
        if other := {name: version for name, version in theirs.items() if version != own[name]}:
            listed = ", ".join(f"{name} {version} (here {own[name]})" for name, version in other.items())
            raise ConfigError(f"decode server {self._url} has {listed}: install the same versions on both")
        probe = _make_probe(self._decoder)
        worker = self._decoder.make_worker()
        expected = [worker.scale(image.blob, image.start, image.shape, box=image.box).copy() for image in probe]
        with self._one_request() as connection:
            found, bad, self._instance = self._exchange(connection, probe)
        if bad or not np.array_equal(found, expected):
            raise ConfigError(
                f"decode server {self._url} decodes images to other pixels than this machine, with the same "
                "versions: use processors of one kind"
            )

    def _packages(self) -> list[str]:
        """Return the packages on which the pixels of this decoder depend."""
        more = {"nvImageCodec": self._decoder.backend == "cpu", "torch": self._decoder.framework == "torch"}
        return ["datasvc", "Pillow", *(name for name, is_used in more.items() if is_used)]

    @contextmanager
    def _one_request(self) -> Iterator[http.client.HTTPConnection]:
        """Yield a connection for a single request, after which a proxy may close it."""
        connection = self._connect()
        try:
            yield connection
        finally:
            self.disconnect(connection)

    def _exchange(
        self, connection: http.client.HTTPConnection, images: Sequence[EncodedImage]
    ) -> tuple[Pixels, dict[int, str], str]:
        """Send images, and return what `parse_answer` does."""
        size = self._decoder.size
        limit_bytes = MAX_HEAD_BYTES + 4 + len(images) * size * size * 3
        body = self._request(connection, "POST", pack_request(self._decoder, images), limit_bytes)
        return parse_answer(body, len(images), size)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, parts: Sequence[Any], limit_bytes: int
    ) -> bytes:
        """Send a request, and return the body of the answer, of at most `limit_bytes`."""
        headers = {"Content-Type": "application/octet-stream"}
        if self._settings.token is not None:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        if parts:
            headers["Content-Length"] = str(sum(map(len, parts)))
        connection.request(method, "/decode", body=iter(parts) if parts else None, headers=headers)
        deadline_s = time.monotonic() + _WHOLE_ANSWER_S
        response = connection.getresponse()
        is_ok = response.status == HTTPStatus.OK
        body = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            body += chunk
            if len(body) > (limit_bytes if is_ok else MAX_HEAD_BYTES):
                raise ValueError(f"its answer has more than {limit_bytes} bytes")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"it did not send a whole answer within {_WHOLE_ANSWER_S:g} s")
        if response.length:
            raise ConnectionError(f"it closed the connection with {response.length} bytes missing")
        response.close()  # `read1` does not, and the connection needs it for the next request
        if is_ok:
            return bytes(body)
        reason = _error_of(bytes(body)) or f"status {response.status} {response.reason}"
        if response.status == HTTPStatus.NOT_FOUND:
            reason = "it does not decode images: start it with --decode-threads"
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise _RefusedConnectionError(reason)
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise http.client.HTTPException(reason)
        raise ConfigError(f"decode server {self._url} refuses: {reason}")


class DecodeServers:
    """The decode servers of a backend.

    Args:
        urls: URLs of the nodes.
        decoder: how images are decoded.

    Raises:
        ConfigError: see `ServerOfLoader`.
    """

    def __init__(self, urls: Sequence[str], decoder: Decoder) -> None:
        settings = PeerSettings.from_environment() if urls else PeerSettings()
        self._servers = {url: ServerOfLoader(url, decoder, settings) for url in urls}

    def connections(self) -> list[ServerConnection]:
        """Return the connections that keep each server busy, of all servers in turns."""
        servers = self._servers.values()
        rounds = range(max((server.num_connections for server in servers), default=0))
        return [
            ServerConnection(server) for number in rounds for server in servers if number < server.num_connections
        ]

    @property
    def num_images(self) -> dict[str, int]:
        """Images that each server has decoded, by its URL."""
        return {url: server.num_images for url, server in self._servers.items()}

    def close(self) -> None:
        """Close all connections."""
        for server in self._servers.values():
            server.close()


def _make_probe(decoder: Decoder) -> list[EncodedImage]:
    """Return images with windows whose pixels show whether two decoders and their filters are the same."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    images = []
    for kind, options in (("JPEG", {"quality": 80}), ("PNG", {})):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind, **options)
        blob = np.frombuffer(file.getvalue(), np.uint8)
        images += [
            EncodedImage(blob, [13, 21], [150, 201]),
            EncodedImage(blob, [0, 0], [192, 256], [3.5, 2.25, 180.0, 170.5]),
        ]
    side = smallest_reduced(decoder.size)
    if decoder.decode_scale == "auto" and side * side <= MAX_PIXELS:  # a server decodes no larger ones
        file = io.BytesIO()
        Image.fromarray(pixels).resize((side, side)).save(file, "JPEG", quality=80)
        images.append(EncodedImage(np.frombuffer(file.getvalue(), np.uint8), [0, 0], [side, side]))
    return images


def _error_of(body: bytes) -> str:
    with suppress(ValueError, AttributeError, RecursionError):
        return str(json.loads(body).get("error", ""))[:500]
    return ""
