"""Encoded videos: an index of the frames without decoding them, and decoding of chosen frames from a key frame on.

A frame is a number in the order of presentation: frame `i` is the `i`-th that a decoder returns which starts at the
first byte. The index has the timestamp (pts) of each frame. A decoder that starts at a key frame in the middle
recognises the frames by their timestamps, with any frame rate, B-frames and open groups of pictures. It does not
rely on seeks: where the container leads elsewhere, or the decoder does not return the key frame (intra refresh), it
decodes from the start. A file whose timestamps are missing or not unique, such as AVI with B-frames, is decoded as a
whole for the index, and then always from the start.

FFmpeg decodes, through PyAV, with limits: a picture has at most `MAX_PIXELS`, and the first bytes choose the demuxer,
because FFmpeg's own choice also opens playlists, which name other files. One frame is in memory at a time, besides
those that the codec refers to.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError
from datasvc.extras import explain_missing
from datasvc.keyed_random import Integers

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.codeccontext import VideoCodecContext
    from av.video.stream import VideoStream

EXTENSIONS: Final = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"})
MAX_PIXELS: Final = 8192 * 4352
"""Largest picture that is decoded: 8K. A decoder may hold up to 16 pictures that later ones refer to."""
_MAX_FRAMES: Final = 1 << 22  # 19 hours at 60 frames per second; indexing takes some 200 bytes a frame
_DEMUXERS: Final = {"mp4": "mov", "mkv": "matroska", "avi": "avi"}  # FFmpeg's names
# First boxes of MP4 and MOV.
_MP4_BOXES: Final = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")
# Numbers of samples in the tables of an MP4: after the version and, in those of a track, the size of all samples.
_MP4_COUNTS: Final = re.compile(rb"(?:st(?:sz|z2).{8}|trun.{4})(.{4})", re.DOTALL)
READABLE: Final = "MP4, MOV, Matroska, WebM and AVI"
_UNKNOWN: Final = -1  # position of a packet
READ_BYTES: Final = 64 << 10
"""Bytes of a file that are read at a time."""

Pixels = npt.NDArray[np.uint8]
Bytes = npt.NDArray[np.uint8]
ReadBytes = Callable[[Bytes, Bytes], Bytes]
"""Reads a part of an encoded file: (view, buffer of its size) -> the bytes, in the buffer or in other memory."""


class KeyFrame(NamedTuple):
    """A frame at which a decoder can start: its timestamps in time bases, and the byte offset of its packet or -1."""

    pts: int
    dts: int
    offset: int


class FrameIndex(NamedTuple):
    """Where the frames of a video are.

    Attributes:
        frames: number of frames.
        pts: timestamp of each frame in time bases, `int64[frames]`, ascending; empty if they are not known.
        key_frames: `KeyFrame` of each key frame, ascending; empty if the file has to be decoded from its start.
    """

    frames: int
    pts: Integers
    key_frames: Sequence[KeyFrame]


class VideoHeader(NamedTuple):
    """What the ingest measures of a video.

    Attributes:
        codec: name in FFmpeg, such as "h264".
        width, height: size of the upright frames in pixels.
        duration: seconds from the first frame to the end of the last.
        fps: mean number of frames per second.
        time_base: seconds per unit of the timestamps.
        frame_index: where the frames are.
    """

    codec: str
    width: int
    height: int
    duration: float
    fps: float
    time_base: float
    frame_index: FrameIndex

    @property
    def measured(self) -> tuple[Any, ...]:
        """The values of the columns that the ingest adds, in their order, see `added_columns`."""
        index, times = self.frame_index, (self.duration, self.fps, self.time_base)
        keys = [key._asdict() for key in index.key_frames]
        return self.width, self.height, index.frames, *times, self.codec, index.pts.tolist(), keys


def read_video_header(content: bytes | memoryview | Bytes, *, decode: bool = False) -> VideoHeader:
    """Index an encoded video: read all packets, and decode the first frame.

    Args:
        content: the complete file.
        decode: also decode all frames, and raise an error for a damaged one.

    Raises:
        BadSampleError: the file is of another format, damaged, truncated or too large, has no frames, or its codec
            has no decoder; the message says which.
        MissingPackageError: PyAV is not installed.
    """
    view = np.frombuffer(content, np.uint8)
    if video_extension(bytes(view[:16])) == "mp4":
        _check_mp4(view)
    with _open(view, _take_view) as (container, stream):
        packets = _read_packets(container, stream)
        announced = stream.frames if "mp4" in container.format.name else 0
        # FFmpeg guesses the timestamps of AVI from the order of packets.
        decode = decode or container.format.name == "avi"
        time_base, codec = float(stream.time_base or 0), stream.codec_context.codec.canonical_name
    if len(packets) < announced:
        raise BadSampleError(f"is truncated: its header announces {announced:,} frames; found {len(packets):,}")
    index = _index_packets(packets)
    if index is None or decode:
        pts = _decode_timestamps(view)
        if index is None or pts != index.pts.tolist():
            index = FrameIndex(len(pts), np.empty(0, np.int64), ())
    if not index.frames:
        raise BadSampleError("has no frames")
    _, first = next(decode_frames(view, index, [0]))
    durations = [packet.duration for packet in packets if packet.duration]
    last = durations[-1] if durations else 0
    ticks = int(index.pts[-1] - index.pts[0]) + last if len(index.pts) else sum(durations)
    duration = ticks * time_base
    fps = index.frames / duration if duration else 0.0
    return VideoHeader(codec, first.shape[1], first.shape[0], duration, fps, time_base, index)


def decode_frames(
    content: Bytes, index: FrameIndex, wanted: Sequence[int], read: ReadBytes | None = None
) -> Iterator[tuple[int, Pixels]]:
    """Yield frames as (number, `uint8[height, width, 3]`), upright, in ascending order.

    Only the packets from the key frame before the first of them on are read and decoded, and the header of the file.

    Args:
        content: the complete file, `uint8[size]`.
        index: index of its frames.
        wanted: numbers of the frames, ascending and distinct.
        read: function that reads a part of `content`; None: access its memory.

    Raises:
        BadSampleError: a frame between the key frame and the last one is damaged or missing.
        MissingPackageError: PyAV is not installed.
        CorruptDataError, UnavailableError: `read` failed.
    """
    left = set(wanted)
    key = key_frame_before(index, wanted[0])
    if key is not None:
        try:
            yield from _decode_from(content, index, key, left, read or _take_view)
        except BadSampleError as error:
            # A seek can lead elsewhere, and after some key frames a decoder needs frames before it.
            try:
                yield from _decode_from(content, index, None, left, read or _take_view)
            except BadSampleError:
                raise error from None
    else:
        yield from _decode_from(content, index, None, left, read or _take_view)


def key_frame_before(index: FrameIndex, number: int) -> KeyFrame | None:
    """Return the last key frame up to a frame; None: decode from the start of the file."""
    keys = [key for key in index.key_frames if key.pts <= index.pts[number]]
    return keys[-1] if keys and keys[-1].pts > index.pts[0] else None


def _decode_from(
    content: Bytes, index: FrameIndex, key: KeyFrame | None, left: set[int], read: ReadBytes
) -> Iterator[tuple[int, Pixels]]:
    """Decode from a key frame, or from the start; yield the frames in `left`, and remove them from it."""
    numbers = {int(index.pts[number]): number for number in left} if len(index.pts) else None
    with _open(content, read) as (container, stream):
        start, packets = (None, container.demux(stream)) if key is None else _seek(container, stream, key)
        is_started = start is None
        for count, frame in enumerate(_decode(packets)):
            if start is not None:
                # Frames that are stored after the key frame, and presented before it, refer to frames before it.
                if frame.pts is not None and frame.pts < start:
                    continue
                if not is_started and frame.pts != start:
                    raise BadSampleError("the decoder does not return the key frame")
                is_started = True
            if frame.is_corrupt:  # later frames refer to it
                raise BadSampleError(f"the frame at {frame.time} s is damaged")
            number = count if numbers is None else numbers.get(frame.pts, -1)  # type: ignore[arg-type]
            if number in left:
                left.remove(number)
                yield number, _upright(frame)
            if not left:
                return
    raise BadSampleError(f"frame {min(left)} of {index.frames} is missing: the file is damaged or truncated")


def _seek(container: InputContainer, stream: VideoStream, key: KeyFrame) -> tuple[int, Iterator[Packet[VideoStream]]]:
    """Return the timestamp of a key frame, which is `key` or an earlier one, and the packets from it on.

    Raise BadSampleError if the container leads to none.
    """
    # Containers differ in the times that they seek to, and those of MP4 depend on the frame rate: check the result.
    # The last of these need not lead to `key` itself.
    for timestamp, backward in ((key.pts, True), (key.dts, False), (key.dts, True)):
        container.seek(timestamp, stream=stream, backward=backward)
        packets = container.demux(stream)
        first = next(packets, None)
        if first is None or first.pts is None or not first.is_keyframe:
            continue
        if first.pts == key.pts or (first.pts < key.pts and timestamp == key.dts and backward):
            return first.pts, chain([first], packets)
    raise BadSampleError("the container does not lead to the key frame")


def _decode(packets: Iterable[Packet[VideoStream]]) -> Iterator[VideoFrame]:
    """Yield the frames of packets; the last packet is empty, and makes the decoder return its last frames."""
    for packet in packets:
        yield from packet.decode()


def _upright(frame: VideoFrame) -> Pixels:
    """Return a frame in RGB, `uint8[height, width, 3]`, rotated as its display matrix says."""
    pixels = cast("Pixels", frame.to_ndarray(format="rgb24", threads=1))
    return np.rot90(pixels, frame.rotation // 90) if frame.rotation else pixels


class _PacketInfo(NamedTuple):
    pts: int | None
    dts: int | None
    duration: int
    offset: int
    is_key: bool
    is_shown: bool  # whether its frame is presented: an edit list of MP4 discards frames


def _read_packets(container: InputContainer, stream: VideoStream) -> list[_PacketInfo]:
    """Return all packets in the order of decoding."""
    found: list[_PacketInfo] = []
    for packet in container.demux(stream):
        if packet.size:
            offset = _UNKNOWN if packet.pos is None else packet.pos
            flags = packet.is_keyframe, not packet.is_discard
            found.append(_PacketInfo(packet.pts, packet.dts, packet.duration or 0, offset, *flags))
            if len(found) > _MAX_FRAMES:
                raise BadSampleError(f"has more than {_MAX_FRAMES:,} frames; divide it")
    return found


def _index_packets(packets: Sequence[_PacketInfo]) -> FrameIndex | None:
    """Return the index of a file; None if the timestamps of its packets do not tell its frames apart."""
    pts = [packet.pts for packet in packets if packet.pts is not None]
    if len(pts) < len(packets) or len(set(pts)) < len(pts):
        return None
    keys = [
        KeyFrame(packet.pts, packet.pts if packet.dts is None else packet.dts, packet.offset)
        for packet in packets
        if packet.is_key and packet.pts is not None
    ]
    # No decoder returns frames that are presented before the first key frame: they refer to frames before it.
    first = keys[0].pts if keys else 0
    shown = sorted(pts for packet, pts in zip(packets, pts, strict=True) if packet.is_shown and pts >= first)
    return FrameIndex(len(shown), np.array(shown, np.int64), sorted(keys))


def _decode_timestamps(content: Bytes) -> list[int | None]:
    """Return the timestamps of all frames in the order in which a decoder returns them."""
    with _open(content, _take_view) as (container, stream):
        found: list[int | None] = []
        for frame in _decode(container.demux(stream)):
            if frame.is_corrupt:
                raise BadSampleError(f"frame {len(found)} is damaged")
            found.append(frame.pts)
        return found


@contextmanager
def _open(content: Bytes, read: ReadBytes) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video for the block, and translate FFmpeg's errors in it. For errors, see `read_video_header`."""
    with explain_missing("decoding of video"):
        import av

    limits = {"max_pixels": str(MAX_PIXELS)}
    file = _ViewFile(content, read)
    try:
        demuxer = _demuxer(file)
        with av.open(
            file, "r", demuxer, options=limits, metadata_errors="replace", buffer_size=READ_BYTES
        ) as container:
            stream = cast("VideoStream | None", container.streams.best("video"))
            if stream is None:
                raise BadSampleError("has no video stream")
            codec: VideoCodecContext | None = stream.codec_context
            if codec is None:
                raise BadSampleError(f"has a codec that PyAV {av.__version__} does not decode; convert it to H.264")
            if codec.width * codec.height > MAX_PIXELS:
                raise BadSampleError(f"claims {codec.width} x {codec.height} pixels; expected at most {MAX_PIXELS:,}")
            # The decoder of H.264 would also refuse the frames before the key frame of an open group of pictures.
            codec.options = limits if codec.name == "h264" else {**limits, "err_detect": "crccheck+explode"}
            codec.thread_count = 1  # clips are decoded in parallel, and frames in flight would take memory
            yield container, stream
    except av.error.FFmpegError as error:
        raise BadSampleError(f"cannot be decoded: {error.strerror}") from error


def video_extension(head: bytes) -> str | None:
    """Return the extension, such as "mp4", of a file that starts with `head`, at least 12 bytes; None: no video."""
    if head[4:8] in _MP4_BOXES:
        return "mp4"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "mkv"
    return "avi" if head.startswith(b"RIFF") and head[8:12] == b"AVI " else None


def _check_mp4(content: Bytes) -> None:
    """Raise BadSampleError if the tables of an MP4 announce more samples than the file has bytes.

    FFmpeg allocates an entry for each sample when it opens the file. A table of equal sizes has only their number.
    """
    start, announced = 0, 0
    while start + 16 <= len(content):
        size, kind, long_size = struct.unpack_from(">I4sQ", content.data, start)
        size = {0: len(content) - start, 1: long_size}.get(size, size)
        if size < 8:  # not even its header
            break
        if kind != b"mdat":
            box = content[start : start + size].tobytes()
            if kind == b"moov" and box[12:16] == b"cmov":
                raise BadSampleError("has a compressed header; write it again, such as with ffmpeg -c copy")
            announced += sum(int.from_bytes(count, "big") for count in _MP4_COUNTS.findall(box))
        start += size
    if announced > len(content):
        raise BadSampleError(f"announces {announced:,} samples in {len(content):,} bytes: damaged or truncated")


def _demuxer(file: _ViewFile) -> str:
    """Return FFmpeg's demuxer for a file. Raise BadSampleError if its format is not read."""
    head = file.read(16)
    file.seek(0)
    extension = video_extension(head)
    if extension is None:
        found = f"is of an unknown format: it starts with {head[:8]!r}" if head else "empty file"
        raise BadSampleError(f"{found}; expected {READABLE}")
    return _DEMUXERS[extension]


class _ViewFile:
    """A file object over a view, as PyAV needs it. It reads only what is asked for."""

    def __init__(self, content: Bytes, read: ReadBytes) -> None:
        self._content, self._read = content, read
        self._position = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer at the end."""
        view = self._content[self._position : self._position + size]
        self._position += len(view)
        return self._read(view, np.empty(len(view), np.uint8)).tobytes()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, which may be after the end, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position


def _take_view(view: Bytes, buffer: Bytes) -> Bytes:  # noqa: ARG001 - a `ReadBytes`
    return view
