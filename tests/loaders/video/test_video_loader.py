"""VideoLoader with real shards: clips equal a sequential decode, resume is exact, bad videos are masked or raised."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import AugmentConfig, DataRanks, PixelFormat, VideoLoader
from datasvc.loaders.video.clips import ClipConfig, plan_clips
from datasvc.repository import Repository
from datasvc.shards.format.schema import VIDEO, added_columns, stored_schema, video_field
from datasvc.shards.versions.dataset import Split
from datasvc.shards.video.video_file import read_video_header
from tests.shards.video.test_video_file import damage
from tests.shards.written_versions import write_table
from tests.support.videos import VIDEOS, decode_all, make_video, picture, video

NAMES = ["h264", "hevc-open-gop", "vp9", "av1", "mpeg4", "h264-open-gop-mkv", "mpeg4-avi"]
FILES = [video(name, frames=frames) for frames in (60, 33) for name in NAMES]
FIELDS = [
    pa.field("key", pa.string(), nullable=False),
    pa.field("label", pa.int32(), nullable=False),
    video_field(VIDEO),
]
SCHEMA = stored_schema(pa.schema(FIELDS))


def split_of(folder, files, headers=None):
    """Return a split of two shards; the label of a sample is its number."""
    repository = Repository.create(str(folder))
    samples = [
        {"key": str(number), "label": number, VIDEO: content}
        | dict(zip(added_columns(FIELDS[2]), header.measured, strict=True))
        for number, (content, header) in enumerate(zip(files, headers or map(read_video_header, files), strict=True))
    ]
    shards = [samples[: len(files) // 2], samples[len(files) // 2 :]]
    table = write_table(repository.objects, [shard for shard in shards if shard], SCHEMA)
    return Split("train", "clips@1", repository, repository.objects.put(table.encode()).digest)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return split_of(tmp_path_factory.mktemp("videos") / "repo", FILES)


def loader_of(split, *, batch_size=4, training=True, **options):
    return VideoLoader(split, **{"batch_size": batch_size, "training": training, "size": 32, "frames": 4} | options)


def test_clips_are_the_frames_of_a_sequential_decode(split):
    layout = PixelFormat("uint8", layout="NHWC")
    for batch in loader_of(split, size=64, training=False, pixels=layout).numpy():
        for index in np.flatnonzero(batch.mask).tolist():
            frames = decode_all(FILES[int(batch.labels[index])])
            numbers = batch.frame_numbers[index]
            assert numbers[0] == (len(frames) - 7) // 2
            assert np.diff(numbers).tolist() == [2, 2, 2]
            for number, pixels in zip(numbers, batch.clips[index], strict=True):
                # The shorter side becomes 64 * 256 / 224, as for images, and the centre is cut out.
                scaled = Image.fromarray(frames[number]).resize((109, 73), Image.Resampling.BILINEAR)
                expected = np.asarray(scaled)[4:68, 22:86]
                assert np.abs(pixels.astype(int) - expected).max() <= 2


def test_all_frames_of_a_clip_have_one_window_one_flip_and_one_colour(tmp_path):
    still = make_video("ffv1", "matroska", frames=20, draw=lambda _, width, height: picture(3, width, height))
    split = split_of(tmp_path / "repo", [still] * 8)
    (batch,) = loader_of(split, batch_size=8, augment=AugmentConfig(brightness=0.4, hue=0.1), pixels="uint8")
    assert (batch.clips.shape, batch.clips.dtype) == ((8, 4, 3, 32, 32), torch.uint8)
    assert (batch.clips == batch.clips[:, :1]).all()
    assert len({clip[0].numpy().tobytes() for clip in batch.clips}) == 8


def test_starts_cover_the_video_and_depend_on_epoch_and_position():
    config = ClipConfig(frames=4, stride=3)
    draw = {"config": config, "seed": 7, "training": True}
    counts, positions = np.full(2000, 30), np.arange(2000)
    clips = plan_clips(counts, positions, epoch=0, **draw)
    starts = clips.numbers[:, 0]
    assert {*starts.tolist()} == {*range(21)}
    assert clips.numbers.max() == 29
    assert (np.diff(clips.numbers) == 3).all()
    assert (plan_clips(counts[5:9], positions[5:9], epoch=0, **draw).numbers == clips.numbers[5:9]).all()
    assert (plan_clips(counts, positions, epoch=1, **draw).numbers != clips.numbers).any()


def test_a_short_video_repeats_its_last_frame(tmp_path):
    config = ClipConfig(frames=4, stride=3)
    clips = plan_clips(np.array([1, 3, 4, 9, 10]), np.arange(5), config=config, seed=0, epoch=0, training=False)
    assert clips.lengths.tolist() == [1, 1, 2, 3, 4]
    assert clips.numbers.tolist() == [[0] * 4, [0] * 4, [0, 3, 3, 3], [0, 3, 6, 6], [0, 3, 6, 9]]
    short = split_of(tmp_path / "repo", [video("mpeg4", frames=5), video("mpeg4")])
    (batch,) = loader_of(short, batch_size=2, training=False, stride=3)
    assert batch.lengths.tolist() == [2, 4]
    assert torch.equal(batch.clips[0, 1], batch.clips[0, 3])
    assert not torch.equal(batch.clips[0, 0], batch.clips[0, 1])
    with pytest.raises(BadSampleError, match="has 5 frames, and a clip spans 10"):
        next(iter(loader_of(short, batch_size=2, training=False, stride=3, short="bad")))
    masking = loader_of(short, batch_size=2, training=False, stride=3, short="bad", on_bad="mask")
    (batch,) = masking
    assert (batch.mask.tolist(), batch.lengths.tolist(), masking.num_bad) == ([False, True], [0, 4], 1)
    assert not batch.clips[0].any()


def collect(loaders, num_batches=None):
    """Return clip and frame numbers by (epoch, position) from the next batches of several ranks."""
    found = {}
    for loader in loaders:
        for count, batch in enumerate(loader, 1):
            for index, position in enumerate(batch.positions.tolist()):
                found[batch.epoch, position] = batch.clips[index].numpy().tobytes()
            if count == num_batches:
                break
    return found


def test_a_run_that_resumes_at_another_size_gets_equal_clips(split):
    options = {"tail": "short", "augment": AugmentConfig(brightness=0.3), "seed": 3}
    with loader_of(split, batch_size=2, **options) as alone:
        expected = collect([alone]) | collect([alone])
    first = [loader_of(split, batch_size=2, ranks=DataRanks(rank, 2), **options) for rank in range(2)]
    found = collect(first, num_batches=2)
    state = first[0].state_dict()
    resumed = [loader_of(split, batch_size=1, ranks=DataRanks(rank, 3), **options) for rank in range(3)]
    for loader in resumed:
        loader.load_state_dict(state)
    found |= collect(resumed)
    found |= collect(resumed)
    assert found == expected
    for loader in (*first, *resumed):
        loader.close()


def test_damaged_videos_are_raised_or_masked_by_name(tmp_path):
    good, damaged = video("mpeg4"), damage(video("mpeg4"), 30)
    header = read_video_header(good)
    files = split_of(tmp_path / "repo", [good, damaged, good, b"no video"], [header] * 4)
    with pytest.raises(BadSampleError, match=r"2 of 4 samples.*'1' .*cannot be decoded.*'3' .*unknown format"):
        next(iter(loader_of(files, training=False, stride=1)))
    loader = loader_of(files, training=False, stride=1, on_bad="mask", num_threads=3)
    (batch,) = loader
    assert batch.mask.tolist() == [True, False, True, False]
    assert [*batch.bad] == [1, 3]
    assert loader.num_bad == 2
    assert not batch.clips[1].any()
    assert torch.equal(batch.clips[0], batch.clips[2])


def test_arguments_that_cannot_work_are_refused(split):
    for options, problem in [
        ({"frames": 0}, "frames is 0"),
        ({"short": "drop"}, "short is 'drop'"),
        ({"on_bad": "skip"}, "on_bad is 'skip'"),
        ({"pixels": "bfloat16"}, "bfloat16"),
        ({"augment": AugmentConfig(transform=lambda image, _: image)}, "transform"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            loader_of(split, **options)


def test_arrays_and_tensors_have_equal_pixels(split):
    options = {"seed": 1, "augment": AugmentConfig(hue=0.1)}
    arrays, tensors = loader_of(split, **options).numpy(), loader_of(split, **options)
    for array, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_array_equal(array.clips, tensor.clips.numpy())
        assert tensor.frame_numbers.tolist() == array.frame_numbers.tolist()


def test_every_kind_of_video_has_a_loader_test():
    assert {name.split("-")[0] for name in VIDEOS} - {"vp8"} <= {name.split("-")[0] for name in NAMES}
