"""Clips of videos in a remote repository: equal frames from verified parts of large files, and few requests."""

import numpy as np
import pytest
import torch

from datasvc.errors import BadSampleError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.loaders import DataRanks, VideoLoader
from datasvc.loaders.video.clips import plan_reads
from datasvc.repository import Objects, Repository
from datasvc.shards.format import parts as parts_module
from datasvc.shards.versions.dataset import Split
from datasvc.shards.video.video_file import FrameIndex, KeyFrame, read_video_header
from tests.loaders.video.test_video_loader import split_of
from tests.shards.video.test_video_file import noise
from tests.support.videos import VIDEOS, make_video, packets_of, video
from tools.bench.origin import FileOrigin, Limits

NAMES = ["h264", "hevc-open-gop", "vp9", "mpeg4", "h264-open-gop-mkv", "mpeg4-avi"]
PART_BYTES = 16 << 10


def large(name, **options):
    return make_video(**VIDEOS[name] | options, frames=60, size=(320, 240), draw=lambda _, w, h: noise(w, h))


@pytest.fixture(scope="module")
def small_limits():
    """Let files of some 100 KB have parts, as those of 8 MiB do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.shards.format.writer.MIN_PARTED_BYTES", 100_000)
        for name, value in {"MIN_PARTED_BYTES": 100_000, "PART_BYTES": PART_BYTES, "_GAP_BYTES": PART_BYTES}.items():
            patch.setattr(parts_module, name, value)
        for name in ("_MIN_AHEAD_BYTES", "_MAX_TAIL_BYTES"):
            patch.setattr(parts_module, name, 64 << 10)
        yield


@pytest.fixture(scope="module")
def files():
    return [large(name) for name in NAMES]


class Remote:
    """A local split, and the same over HTTP from `origin`, which counts what is read."""

    def __init__(self, folder, files):
        self.headers = [read_video_header(content) for content in files]
        self.folder, self.local = folder, split_of(folder, files, self.headers)
        self.paths = [folder / Objects.path(info.digest) for info in self.local.table.shards()]

    def __enter__(self):
        self.origin = FileOrigin(str(self.folder), Limits(None, None, 0.0))
        self.origin.__enter__()
        return self

    def __exit__(self, *raised):
        self.origin.__exit__(*raised)

    @property
    def split(self):
        """The split from a new repository, which has read nothing yet."""
        return Split("train", "clips@1", Repository.open(self.origin.url), self.local.digest)

    def shard_bytes(self):
        """Return how many bytes of shards were read since the last call."""
        paths = self.origin.counts()["paths"]
        self.origin.forget()
        return sum(paths.get(f"/{path.relative_to(self.folder)}", 0) for path in self.paths)

    def flip(self, content, offset):
        """Change a byte of a file that is in a shard."""
        for path in self.paths:
            stored = bytearray(path.read_bytes())
            if (start := stored.find(content[-999:]) + 999 - len(content)) >= 0:
                stored[start + offset] ^= 1
                path.chmod(0o644)
                path.write_bytes(stored)


@pytest.fixture(scope="module")
def remote(tmp_path_factory, small_limits, files):
    with Remote(tmp_path_factory.mktemp("remote") / "repo", files) as opened:
        yield opened


def batches(split, **options):
    options = {
        "batch_size": 3,
        "training": True,
        "size": 32,
        "frames": 4,
        "pixels": "uint8",
        "tail": "short",
    } | options
    with VideoLoader(split, **options) as loader:
        for batch in loader:
            yield batch
            if batch.epoch:
                return


@pytest.mark.parametrize("options", [{"seed": 1}, {"seed": 2}, {"training": False}, {"shuffle": None, "frames": 9}])
def test_remote_clips_equal_local_ones(remote, files, options):
    remote.shard_bytes()
    found, expected = list(batches(remote.split, prefetch=0, **options)), list(batches(remote.local, **options))
    assert len(found) == len(expected) == 2
    for batch, other in zip(found, expected, strict=True):
        assert torch.equal(batch.clips, other.clips)
        assert torch.equal(batch.labels, other.labels)
    assert remote.shard_bytes() < 0.75 * sum(map(len, files))  # AVI is read from the start


@pytest.mark.parametrize("name", ["mpeg4", "h264-open-gop-mkv"])
def test_a_clip_takes_few_requests_and_bytes(tmp_path, small_limits, name):
    content = large(name)
    assert name != "mpeg4" or content.index(b"moov") > content.index(b"mdat")
    with Remote(tmp_path / "repo", [content]) as remote:
        split = remote.split
        for seed in range(4):
            remote.origin.forget()
            (batch,) = batches(split, batch_size=1, seed=seed, prefetch=0)
            first, last = batch.frame_numbers[0, 0].item(), batch.frame_numbers[0, -1].item()
            # From the key frame up to 11 frames before to 12 after; the first ones of the file, and ends of parts.
            frames = last - first + 1 + 11 + 12 + 8
            counts = remote.origin.counts()
            requests = counts["requests"] - (
                4 if seed == 0 else 0
            )  # the table, the sample index, whether the shard is stored
            assert requests <= 5
            assert remote.shard_bytes() < frames / 60 * len(content) + 10 * PART_BYTES + (64 << 10)


@pytest.mark.parametrize(("frames", "offset"), [(1, 40), (3, 40), (3, 100 << 20)])
def test_a_range_that_is_planned_is_small_also_of_few_large_frames(frames, offset):
    index = FrameIndex(frames, np.arange(frames), [KeyFrame(0, 0, offset)])
    plan = plan_reads(index, [0], 1 << 30)
    assert max(stop - start for start, stop in plan.spans) <= 16 << 20


def test_a_header_that_is_changed_or_a_packet_of_a_clip_makes_its_sample_bad(tmp_path, small_limits, files):
    content = files[NAMES.index("mpeg4")]
    good = large("mpeg4")
    offset, size, _ = packets_of(content)[30]
    with Remote(tmp_path / "repo", [content, good]) as remote:
        centre = {"training": False, "batch_size": 2}
        (expected,) = batches(remote.split, **centre)
        remote.flip(content, packets_of(content)[57][0] + 50)  # no clip in the centre reads it
        (batch,) = batches(remote.split, **centre)
        assert torch.equal(batch.clips, expected.clips)
        with pytest.raises(CorruptDataError):
            list(
                batches(Split("train", "clips@1", Repository.open(str(remote.folder)), remote.local.digest), **centre)
            )
        remote.flip(content, offset + size // 2)
        with pytest.raises(BadSampleError, match=r"1 of 2 samples.*'0' \(row 0.*bytes \d+ to \d+ are corrupt"):
            list(batches(remote.split, **centre))
        (batch,) = batches(remote.split, on_bad="mask", **centre)
        assert batch.mask.tolist() == [False, True]
        assert not batch.clips[0].any()
        assert torch.equal(batch.clips[1], expected.clips[1])
        remote.flip(good, 40)
        (batch,) = batches(remote.split, on_bad="mask", **centre)
        assert batch.mask.tolist() == [False, False]


def test_a_store_that_fails_is_no_bad_sample(tmp_path, small_limits, files, monkeypatch):
    with Remote(tmp_path / "repo", files[:2]) as remote:
        split = remote.split

        def fail(*_):
            raise UnavailableError("the store is away")

        monkeypatch.setattr(split.repository.objects, "read_range", fail)
        with pytest.raises(UnavailableError, match="the store is away"):
            list(batches(split, on_bad="mask"))


def test_a_shard_that_is_not_stored_is_opened_as_a_whole_as_attached_ones_are(tmp_path, small_limits, files):
    with Remote(tmp_path / "repo", files[:2]) as remote:
        remote.paths[0].unlink()
        with pytest.raises(NotFoundError, match=r"is missing; restore it"):
            list(batches(remote.split, training=False))


def test_videos_without_parts_are_read_with_their_shard(tmp_path, files, small_limits, monkeypatch):
    small = [video("mpeg4"), video("vp9")]
    monkeypatch.setattr("datasvc.shards.format.writer.MIN_PARTED_BYTES", 1 << 30)  # of an earlier release
    with Remote(tmp_path / "repo", files[:2]) as remote:
        (batch,) = batches(remote.split, batch_size=2, seed=3, prefetch=0)
        (expected,) = batches(remote.local, batch_size=2, seed=3)
        assert torch.equal(batch.clips, expected.clips)
        assert remote.shard_bytes() >= sum(path.stat().st_size for path in remote.paths)
    monkeypatch.undo()
    with Remote(tmp_path / "small", [files[0], small[0], files[1], *small, small[0]]) as remote:
        split = remote.split
        for _ in range(2):
            assert [batch.labels.tolist() for batch in batches(split, prefetch=0, training=False)] == [
                [0, 1, 2],
                [3, 4, 5],
            ]
        large_shard, small_shard = (path.stat().st_size for path in remote.paths)
        # Those beside large videos are read by ranges, once; a shard without large ones is read as a whole.
        assert 2 * small_shard < remote.shard_bytes() < large_shard + 2 * small_shard


def test_ranks_and_a_resume_read_the_same_clips_in_parts(remote):
    options = {"batch_size": 2, "training": True, "size": 32, "frames": 4, "tail": "short", "seed": 5}

    def clips_of(split, *ranks):
        return {
            position: clip.numpy().tobytes()
            for rank in ranks
            for batch in VideoLoader(split, ranks=rank, **options)
            for position, clip in zip(batch.positions.tolist(), batch.clips, strict=True)
        }

    assert clips_of(remote.split, DataRanks(0, 2), DataRanks(1, 2)) == clips_of(remote.local, DataRanks())


def test_clips_from_a_bucket_are_read_in_parts(s3_bucket, small_limits, files, monkeypatch):
    local = split_of(f"{s3_bucket}/clips", files[:2])
    split = Split("train", "clips@1", Repository.open(f"{s3_bucket}/clips"), local.digest)
    lengths, read_range = [], split.repository.objects.read_range

    def note(digest, offset, length):
        lengths.append(length)
        return read_range(digest, offset, length)

    monkeypatch.setattr(split.repository.objects, "read_range", note)
    monkeypatch.setattr(split.repository.objects, "fetch", None)  # of whole objects
    (batch,) = batches(split, prefetch=0)
    assert batch.mask.all()
    assert len(lengths) <= 10
    assert sum(lengths) < sum(map(len, files[:2]))
