"""Frames that are decoded from a key frame equal those of a decode from the start, and bad files are refused."""

import os
import resource

import numpy as np
import pytest

from datasvc.errors import BadSampleError
from datasvc.shards.video import video_file
from datasvc.shards.video.video_file import decode_frames, read_video_header
from tests.support.videos import VIDEOS, decode_all, make_video, packets_of, video

CODECS = {"h264": "h264", "hevc": "hevc", "vp9": "vp9", "vp8": "vp8", "av1": "av1", "mpeg4": "mpeg4"}
VARIABLE = [name for name, kind in VIDEOS.items() if kind["container"] != "avi"]
CASES = [(name, False) for name in VIDEOS] + [(name, True) for name in VARIABLE]


def test_this_process_keeps_its_scheduler_while_a_video_is_encoded():
    before = os.sched_getscheduler(0)
    video("av1", frames=2)
    assert os.sched_getscheduler(0) == before


def decode(content, wanted, index=None, **options):
    view = np.frombuffer(content, np.uint8)
    index = index or read_video_header(content).frame_index
    return dict(decode_frames(view, index, list(wanted), **options))


@pytest.mark.parametrize(("name", "is_variable"), CASES)
def test_frames_equal_those_of_a_sequential_decode(name, is_variable, monkeypatch):
    content = video(name, is_variable=is_variable)
    expected = decode_all(content)
    header = read_video_header(content)
    keys = []
    decode_from = video_file._decode_from
    monkeypatch.setattr(video_file, "_decode_from", lambda *args: keys.append(args[2]) or decode_from(*args))
    assert (header.codec, header.width, header.height) == (CODECS[name.split("-")[0]], 96, 64)
    assert header.frame_index.frames == len(expected) == 60
    for start in [*range(0, 60, 7), 11, 12, 13, 23, 24, 25, 59]:
        wanted = range(start, min(start + 9, 60), 2)
        for number, pixels in decode(content, wanted, header.frame_index).items():
            np.testing.assert_array_equal(pixels, expected[number])
    # A clip was decoded a second time, from the start, only where decoders need more than a key frame.
    assert (len(keys) > 16) == (name == "h264-intra-refresh")
    assert bool(header.frame_index.key_frames) == (name != "h264-avi")  # its timestamps are guesses


def test_time_and_rate_are_those_of_the_frames():
    header = read_video_header(video("h264"))
    assert (header.duration, header.fps) == (pytest.approx(2.4), pytest.approx(25))
    variable = read_video_header(video("h264", is_variable=True))
    assert np.ptp(np.diff(variable.frame_index.pts)) > 0
    assert variable.duration == pytest.approx(np.ptp(variable.frame_index.pts) * variable.time_base, abs=0.1)


def test_no_encoder_leaves_a_test_process_at_real_time_priority():
    video.cache_clear()
    video("av1")
    assert {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")} == {os.SCHED_OTHER}


@pytest.mark.parametrize("name", ["h264", "hevc", "vp9", "av1", "mpeg4"])
def test_a_clip_reads_its_part_of_the_file(name):
    content = make_video(**VIDEOS[name], frames=96, draw=lambda _, w, h: noise(w, h), size=(320, 240))
    index = read_video_header(content).frame_index
    view = np.frombuffer(content, np.uint8)
    read = np.zeros(len(content), np.bool_)

    def note(part, _):
        start = part.ctypes.data - view.ctypes.data
        read[start : start + len(part)] = True
        return part

    assert len(decode(content, [60, 62], index, read=note)) == 2
    assert read.mean() < 0.6
    assert [content[key.offset] for key in index.key_frames]  # positions of packets are in the file


_RNG = np.random.default_rng(1)


def noise(width, height):
    return _RNG.integers(0, 256, (height, width, 3), np.uint8)


def damage(content, packet, *, is_zeroed=False):
    """Return the file with a damaged packet."""
    offset, size, _ = packets_of(content)[packet]
    changed = bytearray(content)
    if is_zeroed:
        changed[offset + 8 : offset + size] = bytes(size - 8)
    else:
        for position in range(offset + size // 3, offset + size, 5):
            changed[position] ^= 0xA5
    return bytes(changed)


@pytest.mark.parametrize("name", ["h264", "hevc", "av1", "mpeg4"])
def test_a_damaged_frame_makes_a_clip_bad_and_others_stay_good(name):
    content = video(name)
    damaged = damage(content, 30, is_zeroed=name in ("h264", "hevc"))
    expected, index = decode_all(content), read_video_header(damaged).frame_index
    with pytest.raises(BadSampleError, match=r"damaged|cannot be decoded|missing"):
        decode(damaged, range(26, 36), index)
    for start in (0, 48):
        for number, pixels in decode(damaged, range(start, start + 8), index).items():
            np.testing.assert_array_equal(pixels, expected[number])


@pytest.mark.parametrize("name", ["h264", "vp9", "mpeg4-avi"])
def test_a_truncated_file_is_refused_or_indexed_to_its_end(name):
    content = video(name)
    cut = content[: len(content) * 2 // 3]
    try:
        header = read_video_header(cut)
    except BadSampleError:
        assert name != "vp9"  # the index of MP4 is at its end, and the last frame of this AVI is incomplete
        return
    assert header.frame_index.frames < 60
    last = header.frame_index.frames - 1
    np.testing.assert_array_equal(decode(cut, [last])[last], decode_all(content)[last])


def test_files_that_are_no_video_are_named():
    for content, reason in [
        (b"", "empty file"),
        (b"#EXTM3U\n/etc/passwd\n", "unknown format"),
        (b"\0\0\0\x18ftypisom" + bytes(100), "cannot be decoded|no video stream"),
        (make_video(frames=0), "no frames|cannot be decoded|no video"),
    ]:
        with pytest.raises(BadSampleError, match=reason):
            read_video_header(content)


def test_a_codec_without_a_decoder_is_named():
    content = video("h264", frames=5)
    assert content.count(b"avc1") == 2  # the second is the sample entry
    with pytest.raises(BadSampleError, match="a codec that PyAV"):
        read_video_header(b"qqqq".join(content.rsplit(b"avc1", 1)))


def test_a_header_that_claims_a_huge_picture_takes_no_memory():
    content = bytearray(video("vp9", frames=5))
    size = content.index(b"\x49\x83\x42") + 3  # after the sync code of the first frame: 4 bits, width, height
    content[size : size + 5] = [content[size] | 0x0F, 0xFF, 0xFF, 0xFF, content[size + 4] | 0xF0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadSampleError, match=r"cannot be decoded|claims|missing"):
        read_video_header(bytes(content))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB; 65536 x 65536 take 6 GiB


@pytest.mark.parametrize("is_fragmented", [False, True])
def test_tables_that_announce_many_samples_are_refused_before_ffmpeg_allocates_them(is_fragmented, monkeypatch):
    content = bytearray(make_video(frames=5, flags="frag_keyframe+empty_moov" if is_fragmented else ""))
    assert read_video_header(content).frame_index.frames == 5
    start = content.rindex(b"trun" if is_fragmented else b"stsz") + (8 if is_fragmented else 12)
    content[start : start + 4] = (1 << 30).to_bytes(4, "big")  # of one size, in no more bytes: 24 GiB in FFmpeg
    monkeypatch.setattr(video_file, "_open", None)
    with pytest.raises(BadSampleError, match="announces 1,073,741,8"):
        read_video_header(content)
    moov = content.index(b"moov")
    content[moov + 8 : moov + 12] = b"cmov"
    with pytest.raises(BadSampleError, match="compressed header"):
        read_video_header(content)


@pytest.mark.parametrize("name", ["h264", "hevc", "vp9", "av1", "mpeg4"])
def test_every_decoder_obeys_the_limit_of_pixels(name, monkeypatch):
    monkeypatch.setattr(video_file, "MAX_PIXELS", 96 * 64 - 1)
    with pytest.raises(BadSampleError, match=r"claims 96 x 64|cannot be decoded"):
        read_video_header(video(name, frames=5))
