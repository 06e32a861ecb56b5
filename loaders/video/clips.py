"""Which frames of a video a clip has, as a pure function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers, derive_keys, uniform
from datasvc.loaders.core.arguments import check_sizes
from datasvc.shards import Shard
from datasvc.shards.format.parts import ReadPlan
from datasvc.shards.format.schema import VIDEO_FRAMES, VIDEO_KEYS, VIDEO_PTS
from datasvc.shards.video.video_file import READ_BYTES, FrameIndex, KeyFrame, key_frame_before

Short = Literal["repeat", "bad"]
_MAX_PLANNED_BYTES: Final = 16 << 20  # of one range
_FRAMES_OF_HEADER: Final = 4  # in bytes: FFmpeg reads the first frame, a key frame, when it opens a file
# In bytes: key frames are larger than others, and a decoder needs the packets after that of a frame to return it.
_FRAMES_AHEAD: Final = 12
_STARTS: Final = 51  # value of `purpose` for `derive_keys`; tournaments have 49 and 50


@dataclass(frozen=True)
class ClipConfig:
    """The frames of a clip.

    Attributes:
        frames: number of frames, at least 1.
        stride: distance of two frames, in frames of the video, at least 1.
        short: treatment of a video that is shorter than a clip: "repeat" its last frame, or count it as a "bad"
            sample, which `DecodeConfig.on_bad` raises or masks.

    Raises:
        ConfigError: a value is out of range.
    """

    frames: int = 8
    stride: int = 2
    short: Short = "repeat"

    def __post_init__(self) -> None:
        check_sizes(frames=self.frames, stride=self.stride)
        if self.short not in get_args(Short):
            raise ConfigError(f"short is {self.short!r}; expected one of {', '.join(get_args(Short))}")

    @property
    def span(self) -> int:
        """Frames of the video from the first frame of a clip to the last."""
        return (self.frames - 1) * self.stride + 1


@dataclass(frozen=True)
class ClipFrames:
    """The clips of a batch.

    Attributes:
        numbers: `int64[n, frames]`, number of each frame in its video, ascending; after the end of a video, that of
            the last frame of the clip that it has.
        lengths: `int64[n]`, number of frames that are not repeated.
    """

    numbers: Integers
    lengths: Integers


def plan_clips(
    counts: Integers, positions: Integers, *, config: ClipConfig, seed: int, epoch: int, training: bool
) -> ClipFrames:
    """Choose the clip of each video: from a random frame in training, in the centre otherwise.

    Args:
        counts: `int64[n]`, frames of each video, at least 1.
        positions: `int64[n]`, positions of the samples in the epoch.
        config: frames of a clip.
        seed: seed of the access order.
        epoch: epoch of the access order.
        training: whether starts are random.
    """
    spare = np.maximum(counts - config.span, 0)
    if training:
        key = derive_keys(seed, epoch, _STARTS, 1)[0]
        starts = (uniform(key, positions, 0) * (spare + 1)).astype(np.int64)
    else:
        starts = spare // 2
    lengths = np.minimum((counts - starts - 1) // config.stride + 1, config.frames)
    steps = np.minimum(np.arange(config.frames), lengths[:, None] - 1)
    return ClipFrames(starts[:, None] + steps * config.stride, lengths)


def read_frame_index(shard: Shard, row: int) -> FrameIndex:
    """Return the index of the frames of the video in a row of a shard."""
    pts, keys = (shard.column(name)[row].values for name in (VIDEO_PTS, VIDEO_KEYS))
    fields = [keys.field(name).to_pylist() for name in KeyFrame._fields]
    return FrameIndex(
        shard.items(VIDEO_FRAMES, np.array([row]))[0],
        pts.to_numpy().astype(np.int64, copy=False),
        [KeyFrame(*values) for values in zip(*fields, strict=True)],
    )


def plan_reads(index: FrameIndex, wanted: Sequence[int], size_bytes: int) -> ReadPlan:
    """Return what `decode_frames` reads of a file: its header, and the packets from the key frame on.

    The frames between two key frames are taken to be of equal sizes. A table at the end of the file, which MP4 and
    Matroska may have, is not planned: the header says where it is.
    """
    offsets = sorted(key.offset for key in index.key_frames)
    if not offsets or offsets[0] < 0:
        return ReadPlan([(0, 1)], size_bytes)  # AVI, which is read from its start
    frame_bytes = (size_bytes - offsets[0]) // index.frames
    # FFmpeg decodes the first frame of each file that it opens.
    spans = [(0, min(offsets[0] + _FRAMES_OF_HEADER * frame_bytes + READ_BYTES, _MAX_PLANNED_BYTES))]
    key = key_frame_before(index, wanted[0])
    start, first = (offsets[0], 0) if key is None else (key.offset, np.searchsorted(index.pts, key.pts))
    later = [key for key in index.key_frames if key.pts > index.pts[wanted[-1]] and key.offset > start]
    stop, last = (later[0].offset, np.searchsorted(index.pts, later[0].pts)) if later else (size_bytes, index.frames)
    share = min(1.0, float((wanted[-1] + 1 + _FRAMES_AHEAD - first) / (last - first)))
    length = min(int((stop - start) * share) + READ_BYTES, _MAX_PLANNED_BYTES, size_bytes - start)
    return ReadPlan([*spans, (start, start + length)], offsets[-1])
