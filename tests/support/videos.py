"""Small videos that PyAV encodes: each frame shows another picture, with its number as bars."""

import functools
import io
import os
from contextlib import suppress
from fractions import Fraction

import av
import numpy as np

FPS = 25
_X264 = {"preset": "veryfast", "threads": "1"}
_X265 = {"preset": "ultrafast"}
_OPEN_X264 = "open-gop=1:keyint=12:min-keyint=12:scenecut=0:bframes=3:b-adapt=0"
_QUIET_X265 = "log-level=none:pools=none:frame-threads=1:keyint=12:min-keyint=12:bframes=3"
# Arguments of `make_video`, by name.
VIDEOS = {
    "h264": {"codec": "libx264", "container": "mp4", "b_frames": 3, "options": _X264},
    "h264-open-gop": {"codec": "libx264", "container": "mp4", "options": {**_X264, "x264-params": _OPEN_X264}},
    "h264-open-gop-mkv": {
        "codec": "libx264",
        "container": "matroska",
        "options": {**_X264, "x264-params": _OPEN_X264},
    },
    "h264-intra-refresh": {
        "codec": "libx264",
        "container": "matroska",
        "options": {**_X264, "x264-params": "intra-refresh=1:keyint=12:bframes=0"},
    },
    "h264-avi": {"codec": "libx264", "container": "avi", "b_frames": 3, "options": _X264},
    "hevc": {
        "codec": "libx265",
        "container": "mp4",
        "options": {**_X265, "x265-params": f"{_QUIET_X265}:open-gop=0"},
    },
    "hevc-open-gop": {
        "codec": "libx265",
        "container": "mp4",
        "options": {**_X265, "x265-params": f"{_QUIET_X265}:open-gop=1"},
    },
    "vp9": {
        "codec": "libvpx-vp9",
        "container": "webm",
        "options": {"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "1", "lag-in-frames": "10"},
    },
    "vp8": {
        "codec": "libvpx",
        "container": "webm",
        "options": {"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "1", "lag-in-frames": "10"},
    },
    "av1": {
        "codec": "libsvtav1",
        "container": "mp4",
        "options": {"preset": "12", "svtav1-params": "keyint=12:lp=1"},
    },
    "mpeg4": {"codec": "mpeg4", "container": "mp4", "b_frames": 2},
    "mpeg4-avi": {"codec": "mpeg4", "container": "avi", "b_frames": 2},
}


def picture(number, width=96, height=64):
    """Return `uint8[height, width, 3]`: a pattern that moves, and the bits of `number` as bars."""
    y, x = np.mgrid[:height, :width]
    planes = (x * 2 + number * 5, y * 3 + number * 11, (x + y) * 2 + number * 17)
    image = np.stack([plane % 256 for plane in planes], axis=-1).astype(np.uint8)
    for bit in range(8):
        image[4:12, 4 + 10 * bit : 14 + 10 * bit] = 255 * (number >> bit & 1)
    return image


@functools.lru_cache(maxsize=64)
def video(name, *, frames=60, is_variable=False):
    """Return the file of `VIDEOS[name]`; with `is_variable`, frames last 10 to 90 milliseconds."""
    return make_video(**VIDEOS[name], frames=frames, is_variable=is_variable)


def _leave_real_time():
    """Give all threads of this process their ordinary priority."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def make_video(
    codec="mpeg4",
    container="mp4",
    *,
    frames=60,
    size=(96, 64),
    b_frames=None,
    options=None,
    is_variable=False,
    pixels="yuv420p",
    draw=picture,
    colours=None,
    gop=12,
    flags="",
    muxer=None,
):
    """Return an encoded file. `draw(number, width, height)` gives its pictures, `colours` is (space, range).

    `flags` are those of MP4 in FFmpeg, `muxer` other options of its writer of the container.
    """
    av.logging.set_level(av.logging.PANIC)
    stream_file = io.BytesIO()
    rng = np.random.default_rng(0)
    with av.open(
        stream_file, "w", format=container, options=({"movflags": flags} if flags else {}) | (muxer or {})
    ) as output:
        stream = output.add_stream(codec, rate=FPS, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        context = stream.codec_context
        context.gop_size = gop
        context.time_base = Fraction(1, 1000) if is_variable else Fraction(1, FPS)
        if b_frames is not None:
            context.max_b_frames = b_frames
        if colours is not None:
            context.colorspace, context.color_range = colours
        output.start_encoding()  # writes the header, also of a file without frames
        pts = 0
        for number in range(frames):
            drawn = av.VideoFrame.from_ndarray(draw(number, *size), format="rgb24")
            target = {} if colours is None else {"dst_colorspace": colours[0], "dst_color_range": colours[1]}
            frame = drawn.reformat(format=pixels, **target)
            frame.pts, frame.time_base = pts, context.time_base
            pts += int(rng.integers(10, 90)) if is_variable else 1
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    if codec == "libsvtav1":
        # SVT-AV1 gives the process of root that encodes the highest real-time priority, for good: no other thread of
        # the machine would run, and the processes that it starts would have it too.
        _leave_real_time()
    return stream_file.getvalue()


def decode_all(content):
    """Return all frames as a plain loop of PyAV decodes them: `uint8[frames, height, width, 3]`."""
    with av.open(io.BytesIO(content)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def packets_of(content):
    """Return (offset, size, whether it is a key frame) of each packet."""
    with av.open(io.BytesIO(content)) as container:
        return [(each.pos, each.size, each.is_keyframe) for each in container.demux(video=0) if each.size]
