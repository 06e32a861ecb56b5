"""Replayed batches against what a hook saw in the training: bytes, keys, ranks, mixtures, tokens, masks."""

import dataclasses

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError, NotFoundError
from datasvc.ledger.masked import Masked
from datasvc.loaders import (
    AudioAugment,
    AudioLoader,
    AugmentConfig,
    DataRanks,
    DecodeConfig,
    Fit,
    ImageLoader,
    MelConfig,
    Mixture,
    MixtureStage,
    ObjectConfig,
    OrderConfig,
    TokenLoader,
    VideoLoader,
)
from datasvc.models import ConsumptionTracker
from datasvc.models.versions.data_use import DataUse, ReadSpan
from datasvc.replay.batch_at import batch_at
from datasvc.repository import Repository
from datasvc.runs import RunLog
from datasvc.shards import ingest, open_dataset
from datasvc.views import replayed
from datasvc.views.replayed import make_sheet, previews, replay_facts, write_replay
from tests.cli.command import run
from tests.loaders.core.test_masks import blocks  # noqa: F401 - a fixture
from tests.loaders.images.test_geometry import sample, write
from tests.loaders.video.test_video_loader import split_of
from tests.models.trainings import commit
from tests.samples import jpeg
from tests.support.sounds import encode, ingest_files, noise
from tests.support.videos import video

AUGMENT = AugmentConfig(scale=(0.3, 1.0), brightness=0.4, hue=0.1)
FAST = {"size": 32, "decode": DecodeConfig(num_threads=1), "augment": AUGMENT}


def train(repository, name, make, *, steps, world_size, run=None, save_at=(), masked=None, parent=None):
    """Take steps with a loader per rank; return, by step, the batches that a hook saw on each rank."""
    loaders = [make(DataRanks(rank, world_size), masked) for rank in range(world_size)]
    first = 0
    if parent is not None:
        entry = repository.entry(repository.resolve("models", parent)).content
        first = entry["step"]
        for loader in loaders:
            loader.load_state_dict(entry["data"][0]["state"])
    reading = ConsumptionTracker(loaders[0], step=first)
    streams = [iter(loader) for loader in loaders]
    seen = {}
    for step in range(first + 1, first + steps + 1):
        batches = [next(stream, None) for stream in streams]
        if batches[0] is None:
            streams = [iter(loader) for loader in loaders]
            batches = [next(stream) for stream in streams]
        seen[step] = batches
        if step in save_at or step == first + steps:
            fields = {"parent": parent} | ({} if run is None else {"run": run})
            parent = commit(repository, name, step, [reading.use()], **fields)
    return seen


def equal(first, second):
    for field in dataclasses.fields(first):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if field.name in {"views", "masks", "objects"}:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, other), field.name
        elif isinstance(one, np.ndarray):
            assert np.array_equal(one, other), field.name
    assert first.keys == second.keys


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_images_of_every_rank_are_replayed_bit_by_bit_with_their_masks(digits, world_size):
    repository, train_split = digits.repository, digits["train"]
    masked = Masked(((0, 70, 110),)) | Masked.rows(train_split.digest, {0: [3, 4]})

    def make(ranks, masked):
        return ImageLoader(
            train_split, batch_size=48, training=True, seed=3, ranks=ranks, columns=("key",), masked=masked, **FAST
        )

    name = f"images-{world_size}"
    seen = train(repository, name, make, steps=32, world_size=world_size, masked=masked)
    for step in (2, 31 if world_size == 1 else 15):  # the second one is in the second epoch
        for rank in range(world_size):
            found = batch_at(repository, f"{name}@1", step, rank=rank)
            equal(seen[step][rank], found.batch)
            assert found.keys == seen[step][rank].columns["key"]
            assert found.purged == []
    whole = batch_at(repository, f"{name}@1", 2)
    assert whole.keys == [key for batch in seen[2] for key in batch.keys]
    assert torch.equal(whole.batch.images, torch.cat([batch.images for batch in seen[2]]))
    counts = torch.cat([batch.mask for batch in seen[2]])
    assert whole.masked == [key for key, count in zip(whole.keys, counts.tolist(), strict=True) if not count] != []


@pytest.mark.parametrize("scale", ["auto", "full"])
def test_large_photos_are_replayed_at_their_scale(repository, scale):
    ingest(repository, [{"key": str(n), "image": jpeg(300, 200, seed=n)} for n in range(8)], "large")
    split, decode = open_dataset(repository, "large")["train"], DecodeConfig(num_threads=1, decode_scale=scale)

    def make(ranks, masked):
        return ImageLoader(split, batch_size=4, training=True, size=16, seed=3, ranks=ranks, decode=decode)

    seen = train(repository, "m", make, steps=1, world_size=1)
    assert torch.equal(batch_at(repository, "m@1", 1).batch.images, seen[1][0].images)


def test_tokens_are_replayed(blocks):  # noqa: F811
    def make(ranks, masked):
        return TokenLoader(blocks, batch_size=3, training=True, seed=1, ranks=ranks, labels="across", masked=masked)

    seen = train(blocks.repository, "tokens", make, steps=6, world_size=2)
    for step in range(1, 7):
        for rank in range(2):
            equal(seen[step][rank], batch_at(blocks.repository, "tokens@1", step, rank=rank).batch)


SHAPES = {
    "square": FAST,
    "fit": {**FAST, "size": Fit(shorter=(40, 56), longer=90, multiple=8), "augment": AugmentConfig(hue=0.1)},
    "grouped": {**FAST, "size": None, "tail": "pad", "augment": AugmentConfig(hue=0.1)},
    "mosaic": {**FAST, "augment": AugmentConfig(scale=(0.5, 1.0), mosaic=0.7, mosaic_epochs=1)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_masks_and_several_images_are_replayed(tmp_path, shape):
    repository = Repository.create(str(tmp_path / "repo"))
    scenes = write(repository, "scenes", [sample(seed) for seed in range(12)])
    scenes = scenes.grouped_by_aspect(8) if shape == "grouped" else scenes
    objects = ObjectConfig(("box_labels",), min_visible=0.3, num_keypoints=2, flip_pairs=((0, 1),))
    columns = {"images": ("image", "half"), "masks": ("seg",), "boxes": "boxes", "keypoints": "keypoints"}

    def make(ranks, masked):
        settings = {"batch_size": 4, "training": True, "ranks": ranks, "masked": masked}
        return ImageLoader(scenes, objects=objects, **columns, **settings, **SHAPES[shape])

    seen = train(repository, "detector", make, steps=3, world_size=2)
    for step in range(1, 4):
        for rank in range(2):
            equal(seen[step][rank], batch_at(repository, "detector@1", step, rank=rank).batch)


@pytest.mark.parametrize("size", [None, Fit(longer=90), Fit(shorter=40, longer=90, max_bytes=200_000)])
def test_the_batch_of_all_ranks_is_shown_also_where_images_keep_their_shape(tmp_path, monkeypatch, size):
    repository = Repository.create(str(tmp_path / "repo"))
    scenes = write(repository, "scenes", [sample(seed) for seed in range(4)])
    log = RunLog.open(repository, "shapes", config={}, data=["scenes@1"], world_size=2)
    log.close()

    def make(ranks, masked):  # with these sizes, a rank's batch has at most 2 * 90 * 90 * 12 bytes
        options = {"batch_size": 2, "training": True, "size": size, "ranks": ranks, "masked": masked}
        return ImageLoader(scenes, **options, decode=DecodeConfig(num_threads=1))

    train(repository, "shapes", make, steps=1, world_size=2, run=log.ref)
    sheet = make_sheet(repository, "shapes@1", None, 4)
    assert (sheet.fault, len(sheet.previews)) == (None, 4)
    monkeypatch.setattr(replayed, "_MAX_PIXEL_BYTES", 1000)
    assert "look at those of a rank" in make_sheet(repository, "shapes@1", None, 4).fault


def test_clips_of_sounds_are_replayed(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    files = {f"{number}.wav": encode(noise(3_000, seed=number)) for number in range(12)}
    sounds = ingest_files(repository, tmp_path / "files", files)
    settings = {"features": "mel", "mel": MelConfig(num_mels=20), "augment": AudioAugment(gain_db=6, time_masks=2)}

    def make(ranks, masked):
        settings_of_all = {"batch_size": 3, "training": True, "seconds": 0.1, "ranks": ranks, "masked": masked}
        return AudioLoader(sounds, **settings, **settings_of_all)

    seen = train(repository, "keywords", make, steps=3, world_size=2)
    for step in range(1, 4):
        for rank in range(2):
            equal(seen[step][rank], batch_at(repository, "keywords@1", step, rank=rank).batch)


def test_clips_of_videos_are_replayed(tmp_path):
    videos = split_of(tmp_path / "repo", [video(name) for name in ("h264", "vp9", "mpeg4")] * 4)

    def make(ranks, masked):
        options = {"frames": 3, "stride": 4, "size": 32, "augment": AugmentConfig(hue=0.2, ratio=(0.9, 1.1))}
        return VideoLoader(videos, batch_size=3, training=True, ranks=ranks, masked=masked, **options)

    seen = train(videos.repository, "actions", make, steps=3, world_size=2)
    for step in range(1, 4):
        for rank in range(2):
            equal(seen[step][rank], batch_at(videos.repository, "actions@1", step, rank=rank).batch)


def mixture_in_stages(digits):
    train_split, val = digits["train"], digits["val"]
    stages = [MixtureStage(96, {train_split: 1, val: 3}, ramp=192)]
    return Mixture([(train_split, 2), (val, 1)], block=16, epoch_samples=320, stages=stages)


def mixture_of_views(digits):
    split = digits["train"]
    parts = [(split.weighted(weights=[number % 4 for number in range(len(split))]), 2), (digits["val"].take(0.5), 1)]
    return Mixture(parts, block=16, epoch_samples=800)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choose",
    [
        lambda digits: datasvc.open(digits.repository.url).dataset("digits@1[label < 3 and height > 0]")["train"],
        lambda digits: digits["train"].weighted(weights=[number % 4 for number in range(len(digits["train"]))]),
        mixture_of_views,
    ],
    ids=["filter", "weights", "mixture"],
)
def test_a_view_is_replayed_before_and_after_a_resume_at_other_ranks(digits, choose, request):
    view, repository, name = choose(digits), digits.repository, f"view-{request.node.callspec.id}"

    def make(ranks, masked):
        return ImageLoader(view, batch_size=48 // ranks.world_size, training=True, seed=5, ranks=ranks, **FAST)

    seen = train(repository, name, make, steps=6, world_size=3)
    seen |= train(repository, name, make, steps=24, world_size=2, parent=f"{name}@1")
    for step in (6, 7, 28):  # before the resume, after it, and in a later epoch
        for rank, batch in enumerate(seen[step]):
            equal(batch, batch_at(repository, f"{name}@2", step, rank=rank).batch)
        assert batch_at(repository, f"{name}@2", step).keys == [key for batch in seen[step] for key in batch.keys]


@pytest.mark.parametrize("stages", [False, True])
def test_a_mixture_is_replayed_with_the_splits_of_its_samples(digits, stages):
    parts = [(digits["train"], 2), (digits["val"], 1)]
    mixture = mixture_in_stages(digits) if stages else Mixture(parts, block=16, epoch_samples=320)
    name = f"mixed-{int(stages)}"

    def make(ranks, masked):
        return ImageLoader(mixture, batch_size=16, training=True, seed=3, ranks=ranks, masked=masked, **FAST)

    seen = train(digits.repository, name, make, steps=14, world_size=2)
    for step in (3, 8, 13):
        found = batch_at(digits.repository, f"{name}@1", step, rank=1)
        equal(seen[step][1], found.batch)
        assert found.sources == [mixture.names[source] for source in seen[step][1].sources.tolist()]


def test_a_step_of_a_run_is_that_of_its_versions_or_what_would_follow_the_last_one(digits):
    repository = digits.repository
    log = RunLog.open(repository, "logged", config={}, data=["digits@1"], world_size=1)
    ref = log.ref
    log.close()  # the log is written by a thread, which this waits for

    def make(ranks, masked):
        return ImageLoader(digits["train"], batch_size=64, training=True, seed=8, ranks=ranks, masked=masked, **FAST)

    seen = train(repository, "logged", make, steps=5, world_size=1, run=ref, save_at=(2,))
    after = make(DataRanks(), None)
    stream = iter(after)
    batches = {step: next(stream) for step in range(1, 8)}
    for step in (1, 4):
        found = batch_at(repository, f"{ref}@{step}")
        equal(seen[step][0], found.batch)
        assert (found.step.version, found.step.is_recorded) == (f"logged@{1 if step == 1 else 2}", True)
    found = batch_at(repository, "logged@7")
    equal(batches[7], found.batch)
    assert (found.step.version, found.step.is_recorded, found.step.run) == ("logged@2", False, ref)
    assert "as the run would have continued" in replay_facts(found)["step"]


def test_what_cannot_be_replayed_is_said(digits, tmp_path):
    repository = digits.repository
    state = {**ImageLoader(digits["train"], batch_size=8, training=True, **FAST).state_dict(), "position": 80}
    span = ReadSpan((0, 0), (0, 80), 0, 8, "drop")
    commit(repository, "bare", 10, [DataUse("digits@1", "train", state, run="ab", spans=(span,))])
    found = batch_at(repository, "bare@1", 4)
    assert len(found.keys) == 8
    with pytest.raises(ConfigError, match="does not record how its loader"):
        _ = found.batch
    with pytest.raises(ConfigError, match="does not record its number of ranks"):
        batch_at(repository, "bare@1", 4, rank=0)
    with pytest.raises(NotFoundError, match="records no step 11"):
        batch_at(repository, "bare@1", 11)
    with pytest.raises(ConfigError, match="names no step"):
        batch_at(repository, "bare")
    gone = DataUse("gone@1", "train", {**state, "version": "0" * 64}, run="cd", spans=(span,))
    commit(repository, "gone", 10, [gone])
    with pytest.raises(NotFoundError, match="gone@1/train, which the run read, is no longer"):
        batch_at(repository, "gone@1", 4)
    moved = AugmentConfig(transform=np.array)
    loader = ImageLoader(digits["train"], batch_size=8, training=True, size=32, augment=moved)
    reading = ConsumptionTracker(loader)
    loader.load_state_dict(state)
    commit(repository, "moved", 10, [reading.use()])
    with pytest.raises(ConfigError, match="--transform"):
        _ = batch_at(repository, "moved@1", 4).batch


def test_a_deletion_since_leaves_the_replay_as_it_was(digits_folder, tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.datasets.ingest(str(digits_folder), "digits")
    split = repo.dataset("digits@1")["train"]

    def make(ranks, masked):
        return ImageLoader(split, batch_size=16, training=True, ranks=ranks, masked=masked, **FAST)

    seen = train(repo.repository, "net", make, steps=3, world_size=1)
    repo.datasets.delete("digits", keys=seen[2][0].keys[:4])
    equal(seen[2][0], repo.models.batch_at("net@1", 2).batch)


def test_purged_samples_are_named_and_the_others_are_as_they_were(digits_folder, tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.datasets.ingest(str(digits_folder / "val"), "digits")
    split = repo.dataset("digits@1")["train"]

    loader = ImageLoader(split, batch_size=16, training=True, masked=Masked(((0, 2, 4),)), **FAST)
    reading = ConsumptionTracker(loader)
    before = next(iter(loader))
    repo.models.save("net", {"w": 1}, step=1, data=[reading.use()])
    gone = before.keys[3:6]  # the first of them was masked too
    repo.datasets.purge("digits", keys=gone, dry_run=False)
    found = datasvc.open(repo.repository.url).models.batch_at("net@1", 1)
    assert (found.keys, found.masked, found.purged) == (before.keys, before.keys[2:3], gone)
    assert [sample["purged"] for sample in found.to_json()["samples"]].index(True) == 3
    is_kept = ~found.is_purged
    assert found.batch.mask.tolist() == (before.mask.numpy() & is_kept).tolist()
    assert torch.equal(found.batch.images[is_kept], before.images[is_kept])
    shown = run("replay", "net@1", "--step", 1, "--repo", repo.repository.url).stdout
    assert f"3 samples without values, masked in the replay: {', '.join(gone)}" in shown
    assert [preview.values["masked"] for preview in previews(found) if preview.key in gone] == ["purged"] * 3


def test_a_run_after_a_purge_masked_nothing_on_request(digits_folder, tmp_path):
    url = str(tmp_path / "repo")
    datasvc.open(url, create=True).datasets.ingest(str(digits_folder / "val"), "digits")
    gone = [sample["key"] for sample in datasvc.open(url).dataset("digits@1")["train"][:20]]
    datasvc.open(url).datasets.purge("digits", keys=gone, dry_run=False)
    repo = datasvc.open(url)
    loader = ImageLoader(repo.dataset("digits@1")["train"], batch_size=64, training=True, **FAST)
    reading = ConsumptionTracker(loader)
    seen = next(iter(loader))
    repo.models.save("net", {"w": 1}, step=1, data=[reading.use()])
    found = repo.models.batch_at("net@1", 1)
    assert (found.masked, found.purged) == ([], [key for key in seen.keys if key in gone])
    assert found.purged != []
    assert "masked" not in replay_facts(found)


def test_a_masked_copy_of_a_sample_is_marked_and_no_other_copy(digits):
    view = digits["train"].weighted(weights=[1000, *[1] * (len(digits["train"]) - 1)])

    def make(ranks, masked):
        return ImageLoader(view, batch_size=16, training=True, ranks=ranks, masked=masked, **FAST)

    train(digits.repository, "copies", make, steps=1, world_size=1, masked=Masked(((0, 0, 3),)))
    found = batch_at(digits.repository, "copies@1", 1)
    assert len(set(found.keys)) < 16
    assert found.is_masked.tolist() == [True] * 3 + [False] * 13
    assert [sample["masked"] for sample in found.to_json()["samples"]] == found.is_masked.tolist()


def test_a_batch_is_written_as_files_and_as_previews(digits, tmp_path):
    loader = ImageLoader(digits["train"], batch_size=8, training=True, order=OrderConfig(seed=2), **FAST)
    reading = ConsumptionTracker(loader)
    batch = next(iter(loader))
    name = commit(digits.repository, "files", 1, [reading.use()])
    found = batch_at(digits.repository, name, 1)
    assert write_replay(found, tmp_path / "batch") == 8
    assert np.array_equal(np.load(tmp_path / "batch" / "inputs.npy"), batch.images.numpy())
    assert sorted(path.name for path in (tmp_path / "batch").glob("*.png")) == [f"{n:05d}.png" for n in range(8)]
    shown = list(previews(found))
    assert [preview.key for preview in shown] == batch.keys
    assert [digits["train"].classes.index(preview.class_name) for preview in shown] == batch.labels.tolist()
    with pytest.raises(ConfigError, match="empty folder"):
        write_replay(found, tmp_path / "batch")
