"""Videos: frames that are not those that were asked for, colours, turns, and files that end early."""

import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from av.video.reformatter import ColorRange, Colorspace

from datasvc.errors import BadSampleError
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.shards.video.video_file import decode_frames, read_video_header
from tests.shards.video.test_video_file import noise
from tests.support.videos import decode_all, make_video, packets_of, video


def decode(content, *wanted):
    """Return the frames of these numbers, each decoded alone."""
    view, index = np.frombuffer(content, np.uint8), read_video_header(content).frame_index
    return [next(decode_frames(view, index, [number]))[1] for number in wanted]


def check_each(content):
    """Check that each frame, decoded alone and in a random order, is that of a decode from the start."""
    expected = decode_all(content)
    order = np.random.default_rng(0).permutation(len(expected)).tolist()
    for number, pixels in zip(order, decode(content, *order), strict=True):
        np.testing.assert_array_equal(pixels, expected[number])


def test_short_groups_of_pictures_of_h265_do_not_lead_a_frame_too_far():
    """meta-pytorch/torchcodec#179: FFmpeg's seek went past the time asked for in H.265 with a key frame every 2."""
    options = {
        "preset": "ultrafast",
        "x265-params": "log-level=none:pools=none:frame-threads=1:keyint=2:min-keyint=2",
    }
    check_each(make_video("libx265", "mp4", frames=10, options=options))


def test_a_frame_after_one_near_the_end_is_not_a_stale_one():
    """meta-pytorch/torchcodec#1339: after a frame near the end of H.265, an earlier one was a frame of before."""
    options = {
        "preset": "ultrafast",
        "x265-params": "log-level=none:pools=none:frame-threads=1:keyint=3:min-keyint=3",
    }
    content = make_video("libx265", "mp4", frames=61, options=options)
    expected = decode_all(content)
    late, early = decode(content, 59, 35)
    np.testing.assert_array_equal(late, expected[59])
    np.testing.assert_array_equal(early, expected[35])


def test_frames_of_avi_whose_timestamps_are_guesses_are_in_the_order_of_presentation():
    """pytorch/vision#1884, #2681: frames of AVI came in another order or were missing, because it has no pts."""
    check_each(video("h264-avi", frames=24))
    check_each(video("mpeg4-avi", frames=24))


def test_frames_of_a_file_with_many_b_frames_are_numbered_as_they_are_shown():
    """dmlc/decord#365: the frame of a number was another one in a video with many B-frames."""
    content = make_video("mpeg4", "mp4", frames=24, b_frames=8)
    assert len({kind for *_, kind in packets_of(content)}) == 2
    check_each(content)


def test_vp8_in_webm_is_not_always_read_from_its_start():
    """dmlc/decord#91: each number gave a frame of the first seconds of a VP8 file."""
    content = video("vp8")
    expected = decode_all(content)
    for number, pixels in zip((59, 40, 13), decode(content, 59, 40, 13), strict=True):
        np.testing.assert_array_equal(pixels, expected[number])
        assert np.abs(pixels.astype(int) - expected[0]).mean() > 5


def test_variable_frame_rates_are_read():
    """NVIDIA/DALI#1775, #1041: such videos were refused, or hung.

    huggingface/lerobot#3696: frames by round(time * fps) were off by one, because times drift from that grid.
    """
    content = video("h264", is_variable=True)
    header = read_video_header(content)
    steps = np.diff(header.frame_index.pts) * header.time_base
    assert steps.max() > 3 * steps.min()
    check_each(video("h264", frames=24, is_variable=True))


def test_the_number_of_frames_is_counted_and_not_the_duration_times_the_rate():
    """dmlc/decord#373: 431 frames by the header, of which 300 exist, and a read of the last ones never returned."""
    content = video("h264-open-gop-mkv")
    cut = content[: packets_of(content)[40][0]]  # Matroska, whose header still has the duration of all frames
    header = read_video_header(cut)
    assert header.frame_index.frames <= 40
    (last,) = decode(cut, header.frame_index.frames - 1)
    np.testing.assert_array_equal(last, decode_all(cut)[-1])


def test_a_damaged_frame_is_no_copy_of_the_frame_before_it():
    """dmlc/decord#119, #83: frames that do not decode became the last good one in silence, or the reader crashed."""
    content = video("mpeg4")
    offset, size, _ = packets_of(content)[30]
    damaged = content[: offset + 8] + bytes(size - 8) + content[offset + size :]
    with pytest.raises(BadSampleError, match=r"cannot be decoded|damaged|missing"):
        decode(damaged, 32)


def test_a_file_that_does_not_decode_is_no_clip_without_frames():
    """pytorch/vision#7281: errors of the decoder were dropped, and the clip had the shape [0, 1, 1, 3]."""
    content = video("h264")
    with pytest.raises(BadSampleError, match=r"cannot be decoded|missing|damaged"):
        read_video_header(content.replace(b"avcC", b"xxxx"))


@pytest.mark.parametrize(
    ("space", "levels"), [(Colorspace.ITU709, ColorRange.MPEG), (Colorspace.ITU601, ColorRange.JPEG)]
)
def test_colours_are_converted_as_the_file_says(space, levels):
    """PyAV-Org/PyAV#2230, #2149: colours of BT.709 were converted as those of BT.601, and full range as limited."""
    flat = np.array([40, 180, 90], np.uint8)

    def draw(_, width, height):
        return np.broadcast_to(flat, (height, width, 3)).copy()

    content = make_video("libx264", "mp4", frames=3, draw=draw, colours=(space, levels), options={"crf": "1"})
    (pixels,) = decode(content, 1)
    assert np.abs(pixels.astype(int) - flat).max() <= 3


@pytest.mark.parametrize(("matrix", "turns"), [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_videos_of_phones_are_upright(matrix, turns):
    """dmlc/decord#24: the rotation in the header of a video was ignored."""
    content = make_video("mpeg4", "mp4", frames=3)
    plain, turned = (
        struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
        for a, b, c, d in ((1, 0, 0, 1), matrix)
    )
    start = content.index(plain, content.index(b"tkhd"))
    rotated = content[:start] + turned + content[start + 36 :]
    header = read_video_header(rotated)
    (pixels,) = decode(rotated, 1)
    np.testing.assert_array_equal(pixels, np.rot90(decode_all(content)[1], turns))
    assert (header.width, header.height) == ((96, 64) if turns == 2 else (64, 96))


def test_packets_without_timestamps_do_not_lose_the_last_frame():
    """meta-pytorch/torchcodec#1363: the last frame of a file whose packets have no pts could not be read alone."""
    content = video("h264-avi", frames=25)
    assert read_video_header(content).frame_index.frames == 25
    (last,) = decode(content, 24)
    np.testing.assert_array_equal(last, decode_all(content)[-1])


def test_windows_that_move_by_a_frame_do_not_jump_at_key_frames():
    """gcanat/video_reader-rs#78: near key frames, a window that began a frame later was one of a second before."""
    content = video("h264", frames=60)
    view, index = np.frombuffer(content, np.uint8), read_video_header(content).frame_index
    expected = decode_all(content)
    for start in range(len(expected) - 8):
        found = list(decode_frames(view, index, range(start, start + 8)))
        assert [number for number, _ in found] == list(range(start, start + 8))
        assert all((pixels == expected[number]).all() for number, pixels in found)


def test_videos_of_which_a_table_has_only_the_paths_are_named(tmp_path):
    """huggingface/datasets#7493: the table had paths of another machine, which was found when a sample was read."""
    clips = [{"bytes": video("vp9"), "path": "a.webm"}, {"bytes": None, "path": "b.webm"}]
    features = {"info": {"features": {"clip": {"_type": "Video"}}}}
    table = pa.table({"clip": clips}).replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, tmp_path / "clips.parquet")
    with pytest.raises(BadSampleError, match=r"column 'clip': only the path 'b.webm' is stored, no bytes"):
        ingest(Repository.create(str(tmp_path / "repo")), str(tmp_path / "clips.parquet"), "clips")


def read_share(content, number):
    """The share of a file that is read for one frame, after a check that it is the right one."""
    view, read = np.frombuffer(content, np.uint8), np.zeros(len(content), np.bool_)

    def note(part, _):
        start = part.ctypes.data - view.ctypes.data
        read[start : start + len(part)] = True
        return part

    ((_, pixels),) = decode_frames(view, read_video_header(content).frame_index, [number], note)
    np.testing.assert_array_equal(pixels, decode_all(content)[number])
    return read.mean()


def test_an_index_at_the_end_of_a_file_is_found_without_reading_the_file():
    """google/ExoPlayer#2695, Vanilagy/mediabunny#323: a player read all of an MP4 whose index is at its end."""
    content = make_video("mpeg4", "mp4", frames=96, size=(320, 240), draw=lambda *_: noise(320, 240))
    assert content.index(b"moov") > content.index(b"mdat")
    assert read_share(content, 90) < 0.25


def test_a_matroska_file_without_cues_has_the_right_frames():
    """google/ExoPlayer#11163, LadybirdBrowser/ladybird#7189: such a file, of a recording, could not be sought in."""
    content = make_video("mpeg4", "matroska", frames=60, muxer={"live": "1"})
    assert b"\x1cS\xbbk" not in content  # the id of cues
    for number in (5, 30, 59):
        assert read_share(content, number) <= 1
