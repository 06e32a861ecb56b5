"""Encoded sounds: headers without decoding, checks that files are complete, and decoding of a part of a file.

libsndfile decodes all formats, through `soundfile`: one library with exact PCM, and seeks in every format. Only files
that `looks_like_audio` accepts reach it, because its other readers (MATLAB, raw and old samplers) are not made
for untrusted bytes. Decoding is done in blocks, so that memory depends on the part that is asked for, and not on what
a header claims.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError, CorruptDataError, UnavailableError
from datasvc.extras import explain_missing

if TYPE_CHECKING:
    from soundfile import SoundFile

EXTENSIONS: Final = frozenset({".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".au"})
READABLE: Final = "WAV, FLAC, MP3, Ogg (Vorbis, Opus), AIFF and AU"
Bytes = npt.NDArray[np.uint8]
Samples = npt.NDArray[np.float32]
ReadBytes = Callable[[Bytes, Bytes], Bytes]
"""Reads a part of an encoded file: (view, buffer of its size) -> the bytes, in the buffer or in other memory."""

_SIGNATURES: Final = (b"fLaC", b"OggS", b"ID3\2", b"ID3\3", b"ID3\4", b".snd")  # of MP3, a tag with its version
_MPEG_LAYER_3: Final = frozenset({0xFA, 0xFB, 0xF2, 0xF3, 0xE2, 0xE3})  # second byte of a frame, after 0xFF
# What phones and web pages hand out as sound, and libsndfile does not decode.
_UNREAD: Final = {
    b"ftyp": "MPEG-4 (AAC)",
    b"\xff\xf1": "AAC",
    b"\xff\xf9": "AAC",
    b"\x1aE\xdf\xa3": "WebM or Matroska",
}
_MAX_RATE, _MAX_CHANNELS = 768_000, 64  # beyond these a header is damaged or hostile
_MAX_SAMPLES: Final = 1 << 31  # of all channels; 8 GiB as float32
_BLOCK_FRAMES: Final = 1 << 16
_COPIED_BYTES: Final = 1 << 20  # files up to this size are read as a whole
_UNKNOWN_SIZES: Final = (0, 0xFFFFFFFF, 0x7FFFFFFF)  # sizes in headers of WAV files that were written to a pipe


class AudioHeader(NamedTuple):
    """Name of the format, such as "FLAC", frames per second, channels, and frames: one sample of each channel."""

    kind: str
    rate: int
    channels: int
    frames: int

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.frames / self.rate


def read_audio_header(content: bytes | memoryview | Bytes, *, decode: bool = False) -> AudioHeader:
    """Check an encoded sound and return its header.

    Args:
        content: the complete file.
        decode: also decode every frame. Otherwise only the last one is decoded, which finds most truncated files.

    Raises:
        BadSampleError: the file is empty, of an unknown format, truncated, has no frames, too many samples, or (with
            `decode`) samples that are not finite; the message says which.
        MissingPackageError: soundfile is not installed.
    """
    view = np.frombuffer(content, np.uint8)
    _check_end(view)
    with open_audio(view) as file:
        header = AudioHeader(file.format, file.samplerate, file.channels, file.frames)
        if header.frames * header.channels > _MAX_SAMPLES:
            raise BadSampleError(
                f"has {header.frames:,} frames of {header.channels} channels; expected fewer samples"
            )
        start = 0 if decode else header.frames - 1
        decoded = sum(map(len, decode_blocks(file, start, header.frames - start)))
        if start + decoded != header.frames:
            raise BadSampleError(f"is truncated or damaged: {header.frames:,} frames announced, {decoded:,} decoded")
    return header


@contextmanager
def open_audio(content: Bytes, read: ReadBytes | None = None) -> Iterator[SoundFile]:
    """Open an encoded sound for the block.

    Args:
        content: the complete file, `uint8[size]`.
        read: function that reads a part of `content`; None: access its memory.

    Raises:
        BadSampleError: the file is empty, of an unknown format or damaged, inside the block too.
        MissingPackageError: soundfile is not installed.
        CorruptDataError, UnavailableError: `read` failed.
    """
    with explain_missing("decoding of sound"):
        import soundfile

    stream = _ViewStream(content, read or (lambda view, _: view))
    try:
        _check_signature(stream.read(12).tobytes())
        stream.seek(0)
        with _open_quickly(stream, len(content)) as target, soundfile.SoundFile(target, closefd=False) as file:
            if not (1 <= file.samplerate <= _MAX_RATE and 1 <= file.channels <= _MAX_CHANNELS):
                raise BadSampleError(
                    f"has a rate of {file.samplerate} Hz and {file.channels} channels; expected at most {_MAX_RATE} "
                    f"Hz and {_MAX_CHANNELS} channels"
                )
            if file.frames < 1:
                raise BadSampleError("has no frames")
            yield file
    except soundfile.SoundFileError as error:
        raise BadSampleError(f"cannot be decoded: {getattr(error, 'error_string', error)}") from error
    finally:
        # After a failed read, the file seems to be empty, damaged or truncated.
        if stream.error is not None:
            raise stream.error


@contextmanager
def _open_quickly(stream: _ViewStream, size_bytes: int) -> Iterator[_ViewStream | int]:
    """Yield a descriptor of a copy of a small file in memory, otherwise the stream itself.

    libsndfile reads a descriptor without Python: reads by a stream take the GIL, which threads wait for.
    """
    if size_bytes > _COPIED_BYTES or not hasattr(os, "memfd_create"):
        yield stream
        return
    descriptor = os.memfd_create("datasvc-audio", os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, stream.read(size_bytes), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def decode_blocks(file: SoundFile, start: int, count: int) -> Iterator[Samples]:
    """Yield frames [start, start + count) as `float32[frames, channels]` in blocks; fewer if the file ends before.

    Integers of b bits become x / 2 ** (b - 1), which is exact up to 24 bits. Each block is valid until the next one.

    Raises:
        BadSampleError: a sample is NaN or infinite.
    """
    # Bits of an MP3 frame may be in the nine frames before it, so the first ones after a seek have other samples.
    frame = 1152 if file.samplerate >= 32_000 else 576  # samples of MPEG-1, and of MPEG-2
    skipped = min(start, 10 * frame) if file.format == "MP3" else 0
    file.seek(start - skipped)
    # soundfile seeks after each read of a seekable file, so that every block would begin with such samples.
    file.seekable = lambda: False
    file.read(skipped, dtype="float32")
    block = np.empty((min(count, _BLOCK_FRAMES), file.channels), np.float32)
    while count > 0:
        frames = file.read(out=block[: min(count, len(block))])
        if not np.isfinite(frames).all():
            raise BadSampleError("has samples that are not finite (NaN or infinite)")
        if not len(frames):
            return
        count -= len(frames)
        yield frames


class _ViewStream(io.RawIOBase):
    """A file object over a view, as libsndfile needs it. It reads only what is asked for.

    Attributes:
        error: error of a read. libsndfile calls this object through C, where an exception would be lost.
    """

    def __init__(self, content: Bytes, read: ReadBytes) -> None:
        self._content, self._read = content, read
        self._position = 0
        self.error: CorruptDataError | UnavailableError | None = None

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        view = self._content[self._position : self._position + len(buffer)]
        target = np.frombuffer(buffer, np.uint8)[: len(view)]
        try:
            found = self._read(view, target)
        except (CorruptDataError, UnavailableError) as error:
            self.error = error
            return 0
        if found is not target:
            target[:] = found
        self._position += len(view)
        return len(view)

    def read(self, size: int = -1) -> Any:
        """Return the next bytes, `uint8[size]`."""
        found = np.empty(size, np.uint8)
        return found[: self.readinto(found)]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`; positions beyond the ends are moved to the ends."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = max(0, min(base + offset, len(self._content)))
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position


def looks_like_audio(head: bytes) -> bool:
    """Return whether a file that starts with `head`, at least 12 bytes, is a sound by its first bytes."""
    if head.startswith((b"RIFF", b"RIFX", b"RF64")):
        return head[8:12] == b"WAVE"
    if head.startswith(b"FORM"):
        return head[8:12] in (b"AIFF", b"AIFC")
    return head.startswith(_SIGNATURES) or (head[:1] == b"\xff" and head[1:2] != b"" and head[1] in _MPEG_LAYER_3)


def audio_extension(head: bytes) -> str | None:
    """Return the usual extension of a sound that starts with `head`, such as "flac"; None if it is no sound."""
    known = {b"RIFF": "wav", b"RIFX": "wav", b"RF64": "wav", b"fLaC": "flac", b"OggS": "ogg", b"FORM": "aiff"}
    return {**known, b".snd": "au"}.get(head[:4], "mp3") if looks_like_audio(head) else None


def _check_signature(head: bytes) -> None:
    if not head:
        raise BadSampleError("empty file")
    if not looks_like_audio(head):
        known = next((name for start, name in _UNREAD.items() if head.startswith(start) or head[4:8] == start), None)
        found = f"is {known}" if known else f"is of an unknown format: it starts with {head[:8]!r}"
        raise BadSampleError(f"{found}; expected {READABLE}: convert it, or leave it out")


def _check_end(content: Bytes) -> None:
    """Raise BadSampleError if a file ends before its headers say, where libsndfile accepts that: MP3 and FLAC not."""
    head = content[:36].tobytes()
    if head.startswith(b"OggS"):
        _check_pages(content)
    if head.startswith(b".snd"):
        _check_size(int.from_bytes(head[8:12], "big"), len(content) - int.from_bytes(head[4:8], "big"))
    if not head.startswith((b"RIFF", b"RIFX", b"RF64", b"FORM")):
        return
    order: Literal["big", "little"] = "big" if head.startswith((b"RIFX", b"FORM")) else "little"
    # In RF64 (EBU Tech 3306), a chunk before all others has the size of the samples.
    long_size = int.from_bytes(head[28:36], "little") if head[12:16] == b"ds64" else None
    position = 12
    while position + 8 <= len(content):
        chunk = content[position : position + 8].tobytes()
        size = int.from_bytes(chunk[4:], order)
        if chunk.startswith((b"data", b"SSND")):
            _check_size(size if long_size is None else long_size, len(content) - position - 8)
            return
        position += 8 + size + size % 2


def _check_size(size: int, found: int) -> None:
    if found < size and size not in _UNKNOWN_SIZES:
        raise BadSampleError(f"is truncated: {size:,} bytes of samples announced, {max(found, 0):,} found")


def _check_pages(content: Bytes) -> None:
    """Raise BadSampleError if pages of an Ogg file (RFC 3533) are missing in the middle or at the end."""
    position, flags = 0, 0
    while position < len(content):
        header = content[position : position + 27].tobytes()
        if len(header) < 27 or not header.startswith(b"OggS"):
            raise BadSampleError(f"is damaged: no Ogg page begins at byte {position:,}")
        flags, num_segments = header[5], header[26]
        position += 27 + num_segments + int(content[position + 27 : position + 27 + num_segments].sum(dtype=np.int64))
    if position > len(content) or not flags & 4:
        raise BadSampleError("is truncated: its last Ogg page is not the end of the stream")
