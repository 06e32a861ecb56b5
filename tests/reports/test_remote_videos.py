"""Videos in remote stores: whole files read for a clip, ranges that are wrong at their ends, damage in a range."""

from itertools import pairwise

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from datasvc.errors import CorruptDataError, UnavailableError
from datasvc.loaders.video.clips import plan_reads
from datasvc.shards.format import parts as parts_module
from datasvc.shards.format.parts import PartedBlob, ReadPlan
from datasvc.shards.format.sample_index import SampleParts
from datasvc.shards.video.video_file import _ViewFile, decode_frames, read_video_header
from tests.shards.video.test_video_file import noise
from tests.support.videos import VIDEOS, decode_all, make_video

SIZE = 4 << 10  # of a part
NOTHING_PLANNED = ReadPlan([], 1 << 40)
RAW = np.random.default_rng(3).integers(0, 256, 40 * SIZE + 7, np.uint8).tobytes()


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    for name in ("_GAP_BYTES", "_MIN_AHEAD_BYTES"):
        monkeypatch.setattr(parts_module, name, 4 * SIZE)


class Remote:
    """A file that is read by parts, with the requests for it; `fail` is called before each of them."""

    def __init__(self, raw, plan=NOTHING_PLANNED, fail=lambda: None):
        self.raw, self.requests, self._fail = raw, [], fail
        self.view = np.zeros(len(raw), np.uint8)  # a reader that looks at it would find zeros
        digests = [xxh3_128_digest(raw[start : start + SIZE]) for start in range(0, len(raw), SIZE)]
        self.blob = PartedBlob(self.view, SampleParts(0, SIZE, b"".join(digests)), self._request, "x", plan)

    def _request(self, offset, length):
        assert 0 <= offset < offset + length <= len(self.raw)
        self._fail()
        self.requests.append(range(offset, offset + length))
        return self.raw[offset : offset + length]

    def read(self, start, stop):
        view = self.view[start:stop]
        return self.blob.read(view, np.empty(len(view), np.uint8)).tobytes()

    @property
    def num_bytes(self):
        return sum(map(len, self.requests))


def read_clip(content, numbers):
    """Return a remote file after a clip of it was decoded; its frames are checked."""
    view, index = np.frombuffer(content, np.uint8), read_video_header(content).frame_index
    remote = Remote(content, plan_reads(index, numbers, len(view)))
    found = dict(decode_frames(remote.view, index, numbers, remote.blob.read))
    expected = decode_all(content)
    assert [*found] == numbers
    assert all((found[number] == expected[number]).all() for number in numbers)
    return remote


def episode(name, size=(160, 120), **options):
    return make_video(**VIDEOS[name] | options, frames=240, size=size, draw=lambda _, w, h: noise(w, h))


def test_reads_after_seeks_return_the_range_that_was_asked_for():
    """fsspec/s3fs#220, fsspec/filesystem_spec#117: a read around a block that was cached returned other bytes."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        spans = [sorted(rng.integers(0, len(RAW), 2).tolist()) for _ in range(2)]
        remote = Remote(RAW, ReadPlan(spans, int(rng.integers(0, len(RAW)))))
        for start, stop in [(10 * SIZE, 11 * SIZE), (4, 30 * SIZE), *np.sort(rng.integers(0, len(RAW), (20, 2)))]:
            assert remote.read(start, stop) == RAW[start:stop]


@pytest.mark.parametrize("size", [8 * SIZE - 1, 8 * SIZE, 8 * SIZE + 1])
def test_no_request_goes_beyond_the_end_of_a_file(size):
    """fsspec/filesystem_spec#2081, apple/foundationdb#13264: the last block of a file was read beyond its end."""
    for plan in (ReadPlan([(0, 10), (size - 1, size + 9 * SIZE)], size), ReadPlan([], 0)):
        remote = Remote(RAW[:size], plan)
        assert remote.read(size - 5, size + 100) == RAW[size - 5 : size]
        assert remote.read(0, size) == RAW[:size]


def test_a_range_that_could_not_be_read_is_not_zeros_later():
    """fsspec/filesystem_spec#799: blocks that were not read were zeros of a cached file for the next reader."""
    left = [UnavailableError("the store is away")]

    def fail():
        if left:
            raise left.pop()

    remote = Remote(RAW, fail=fail)
    with pytest.raises(UnavailableError):
        remote.read(5, 9)
    assert remote.read(5, 9) == RAW[5:9]


def test_a_late_clip_of_matroska_costs_about_what_one_of_mp4_costs():
    """meta-pytorch/torchcodec#1223: late frames of a large MKV took 42 times as long as those of the same MP4."""
    costs = [read_clip(episode("mpeg4", container=name), [200, 202, 204]).num_bytes for name in ("mp4", "matroska")]
    assert costs[1] < 1.5 * costs[0]


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_window_of_a_long_episode_reads_its_own_part_once_in_few_requests(container):
    """galilai-group/stable-worldmodel#297: a window read all of its episode, which decoders kept in memory.

    media-kit/media-kit#1172: a player sent one request after another, each to the end of the file.
    """
    remote = read_clip(episode("mpeg4", container=container), [100, 102, 104])
    assert len(remote.requests) <= 4
    assert remote.num_bytes < 0.3 * len(remote.raw)
    ranges = sorted((request.start, request.stop) for request in remote.requests)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
    assert sum(map(len, remote.blob._held.values())) == remote.num_bytes


def test_tables_that_are_spread_over_a_file_do_not_take_a_request_each():
    """google/ExoPlayer#2695 asks for few requests for tables at the end; those of fragmented MP4 are everywhere."""
    content = episode("h264", size=(320, 240), flags="frag_keyframe+empty_moov+default_base_moof")
    assert content.count(b"moof") >= 20
    remote = read_clip(content, [220, 222])
    assert len(remote.requests) < content.count(b"moof")


def test_damage_in_a_range_is_found_without_the_rest_of_the_file():
    """openvstorage/alba#354: checksums of whole objects found no damage in what a partial read returned."""
    content = episode("mpeg4")
    packets, index = read_clip(content, [100, 102]).requests[1], read_video_header(content).frame_index
    for offset in (packets.start + SIZE, packets.stop - 3 * SIZE, len(content) - 2):
        remote = Remote(content)
        remote.raw = content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]
        with pytest.raises(CorruptDataError, match=r"bytes \d+ to \d+ are corrupt"):
            list(decode_frames(remote.view, index, [100, 102], remote.blob.read))


def test_a_seek_beyond_the_end_reads_nothing():
    """PyAV-Org/PyAV#690: FFmpeg seeks beyond the end of some files, which a reader of ranges took for an error."""
    remote = Remote(RAW)
    file = _ViewFile(remote.view, remote.blob.read)
    assert file.seek(len(RAW) + 999) == len(RAW) + 999
    assert file.read(10) == b""
    assert not remote.requests
