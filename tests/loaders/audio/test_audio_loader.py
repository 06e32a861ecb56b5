"""AudioLoader with real shards: exact clips, resumption, padding and bad samples."""

import numpy as np
import pytest
from scipy.signal import resample_poly

from datasvc.errors import BadSampleError, ConfigError
from datasvc.ledger.masked import Masked
from datasvc.loaders import AudioAugment, AudioLoader, DataRanks, MelConfig, Mixture
from datasvc.loaders.audio.clips import plan_clips
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.format.schema import FRAMES
from tests.support.sounds import FORMATS, decode, encode, ingest_files, noise

RATE = 16_000
MASKS = AudioAugment(gain_db=6, time_masks=2, freq_masks=1)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return Repository.create(str(tmp_path_factory.mktemp("audio") / "repo"))


@pytest.fixture(scope="module")
def files():
    """Files of several formats, rates, lengths and channels, by key."""
    found = {}
    for number in range(26):
        extension = [*FORMATS][number % 5]
        rate = 48_000 if extension == "opus" else (16_000, 44_100, 8_000)[number % 3]
        samples = noise(int(rate * (0.2 + 0.1 * (number % 7))), 1 + number % 2, seed=number)
        found[f"{'ab'[number % 2]}/{number:02}.{extension}"] = encode(samples, rate, extension)
    return found


@pytest.fixture(scope="module")
def split(repository, tmp_path_factory, files):
    return ingest_files(repository, tmp_path_factory.mktemp("files"), files)


def serve(split, *, ranks=1, batch_size=6, training=True, **options):
    """Return features, length and mask of each position of the first epoch, as bytes."""
    served = {}
    for rank in range(ranks):
        place = DataRanks(rank, ranks)
        with AudioLoader(
            split, batch_size=batch_size, training=training, seconds=0.4, seed=3, ranks=place, tail="pad", **options
        ) as loader:
            for batch in loader.numpy():
                rows = zip(batch.positions, batch.features, batch.length, batch.mask, strict=True)
                served |= {int(position): (each.tobytes(), n, kept) for position, each, n, kept in rows if kept}
    return served


def test_a_wav_file_is_served_bit_equal(repository, tmp_path):
    integers = np.random.default_rng(0).integers(-(2**15), 2**15, RATE, dtype=np.int16)
    split = ingest_files(repository, tmp_path, {"a.wav": encode(integers)}, "exact")
    with AudioLoader(split, batch_size=1, training=False, seconds=1.0) as loader:
        (batch,) = loader.numpy()
    assert batch.features.tobytes() == (integers / np.float32(2**15)).tobytes()
    assert (batch.features.shape, batch.length.tolist(), batch.labels) == ((1, 1, RATE), [RATE], None)


def test_a_clip_equals_its_part_of_the_whole_file_resampled(repository, tmp_path):
    content = encode(noise(44_100, 2), 44_100, "flac")
    split = ingest_files(repository, tmp_path, {"a.flac": content}, "resampled")
    whole = resample_poly(decode(content).mean(1).astype(np.float64), 160, 441)
    with AudioLoader(split, batch_size=1, training=False, seconds=0.4) as loader:  # the middle: frames 13,230 on
        (batch,) = loader.numpy()
    first = 13_230 * 160 // 441
    np.testing.assert_allclose(batch.features[0, 0], whole[first : first + 6_400], atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"features": "mel", "augment": MASKS}, {"channels": 2}], ids=repr)
def test_any_number_of_ranks_and_threads_serves_the_same_bits(split, options):
    alone = serve(split, num_threads=1, **options)
    assert len(alone) == len(split)
    assert serve(split, ranks=3, batch_size=2, num_threads=3, prefetch=0, **options) == alone


def test_a_resumed_run_continues_with_the_same_bits(split):
    whole = serve(split, features="mel", augment=MASKS)
    settings = {"training": True, "seconds": 0.4, "seed": 3, "tail": "pad", "features": "mel", "augment": MASKS}
    with AudioLoader(split, batch_size=4, **settings) as loader:
        iterator = loader.numpy()
        for _ in range(2):
            next(iterator)
        state = loader.state_dict()
    rest = {}
    for rank in range(2):
        with AudioLoader(split, batch_size=5, ranks=DataRanks(rank, 2), **settings) as loader:
            loader.load_state_dict(state)
            for batch in loader.numpy():
                rows = zip(batch.positions, batch.features, batch.mask, strict=True)
                rest |= {int(position): each.tobytes() for position, each, kept in rows if kept}
    assert rest == {position: each for position, (each, _, _) in whole.items() if position >= 8}


def test_epochs_and_seeds_draw_other_clips(split):
    def starts(seed, epoch):
        frames = np.full(100, 100_000)
        drawn = {"seconds": 1.0, "augment": AudioAugment(gain_db=6)}
        clips = plan_clips(frames, np.full(100, RATE), np.arange(100), seed=seed, epoch=epoch, **drawn)
        assert 0 <= clips.starts.min() < clips.starts.max() <= 84_000
        assert clips.gains.min() == pytest.approx(0.5, abs=0.1)
        assert clips.gains.max() == pytest.approx(2, abs=0.2)
        return clips.starts.tolist()

    assert starts(1, 0) == starts(1, 0)
    assert len({tuple(starts(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_a_short_file_is_padded_and_its_length_returned(repository, tmp_path):
    files = {"a.wav": encode(noise(4_000)), "b.wav": encode(noise(2_205), 22_050)}
    split = ingest_files(repository, tmp_path, files, "short")
    for training in (False, True):
        with AudioLoader(split, batch_size=2, training=training, seconds=0.5, shuffle=None) as loader:
            (batch,) = loader
        assert batch.length.tolist() == [4_000, 1_600]
        for each, length in zip(batch.features, batch.length, strict=True):
            assert each[0, length - 50 : length].abs().max() > 0
            assert not each[0, length:].any()
    with AudioLoader(split, batch_size=2, training=False, seconds=0.5, features="mel") as loader:
        (batch,) = loader
    assert (batch.features.shape, batch.length.tolist()) == ((2, 1, 64, 51), [26, 11])


def test_channels_are_mixed_repeated_or_refused(repository, tmp_path):
    mono, stereo, surround = noise(1_600), noise(1_600, 2), noise(1_600, 6)
    files = {f"{number}.wav": encode(each) for number, each in enumerate((mono, stereo, surround))}
    split = ingest_files(repository, tmp_path, files, "channels")
    settings = {"batch_size": 3, "training": False, "seconds": 0.1}
    with AudioLoader(split, **settings) as loader:
        (batch,) = loader.numpy()
    for number, each in enumerate(files.values()):
        assert batch.features[number, 0].tobytes() == decode(each).mean(1).tobytes()
    with AudioLoader(split, channels=2, on_bad="mask", **settings) as loader:
        (batch,) = loader.numpy()
    assert batch.features[0].tobytes() == np.tile(decode(files["0.wav"]).T, (2, 1)).tobytes()
    assert batch.features[1].tobytes() == decode(files["1.wav"]).T.tobytes()
    assert (batch.mask.tolist(), loader.num_bad) == ([True, True, False], 1)
    assert "2.wav" in batch.bad[2]
    assert "has 6 channels; expected 1 or 2" in batch.bad[2]


def test_a_bad_sample_is_named_and_raised_or_masked(repository, tmp_path):
    broken = noise(8_000)
    broken[4_000] = np.nan
    files = {"a/1.wav": encode(noise(8_000)), "b/2.wav": encode(broken, subtype="FLOAT")}
    split = ingest_files(repository, tmp_path, files, "bad")
    strict = AudioLoader(split, batch_size=2, training=False, seconds=0.5)
    with strict, pytest.raises(BadSampleError, match=r"1 of 2 samples.*b/2\.wav.*: has samples that are not finite"):
        next(iter(strict))
    with AudioLoader(split, batch_size=2, training=False, seconds=0.5, on_bad="mask") as loader:
        (batch,) = loader
    assert (batch.mask.tolist(), list(batch.bad), batch.length.tolist()) == ([True, False], [1], [8_000, 0])
    assert batch.features.any((1, 2)).tolist() == [True, False]
    assert batch.labels.tolist() == [0, 1]


def test_masks_stay_in_the_sound_and_have_its_mean(repository, tmp_path):
    split = ingest_files(repository, tmp_path, {f"{n}.wav": encode(noise(4_000, seed=n)) for n in range(40)}, "masks")
    settings = {"batch_size": 40, "training": True, "seconds": 1.0, "features": "mel", "shuffle": None}

    def one_batch(**augment):
        with AudioLoader(split, augment=AudioAugment(**augment), **settings) as loader:
            return next(loader.numpy())

    plain, masked = one_batch(), one_batch(time_masks=3, time_mask=8, freq_masks=2, freq_mask=5)
    changed = plain.features != masked.features
    assert changed.any((0, 1, 2)).tolist() == [True] * 26 + [False] * 75
    for number in range(40):
        values = masked.features[number][changed[number]]
        np.testing.assert_allclose(values, plain.features[number, :, :, :26].mean(), rtol=1e-4)
        within = changed[number, 0, :, :26]
        assert within.all(0).sum() <= 3 * 8
        assert within.all(1).sum() <= 2 * 5 or within.all()


def test_a_gain_changes_the_whole_clip_by_one_factor(split):
    plain, louder = (serve(split, augment=AudioAugment(gain_db=gain)) for gain in (0, 6))
    factors = []
    for position, (content, _, _) in plain.items():
        wave, changed = (np.frombuffer(each, np.float32) for each in (content, louder[position][0]))
        loud = np.abs(wave) > 0.1
        factors.append(np.mean(changed[loud] / wave[loud]))
        np.testing.assert_allclose(changed, wave * factors[-1], rtol=1e-5, atol=1e-7)
    assert 0.5 < min(factors) < 0.8
    assert 1.25 < max(factors) < 2


def test_columns_masks_mixtures_and_tensors(split, files):
    with AudioLoader(
        split,
        batch_size=13,
        training=False,
        seconds=0.2,
        columns=[FRAMES, "key"],
        masked=Masked(positions=((0, 2, 4),)),
    ) as loader:
        batches = list(loader)
    keys = [key for batch in batches for key in batch.columns["key"]]
    assert sorted(keys) == sorted(files)
    assert batches[0].columns[FRAMES].tolist() == [len(decode(files[key])) for key in keys[:13]]
    assert batches[0].mask.tolist() == [True, True, False, False, *[True] * 9]
    assert not batches[0].features[2:4].any()
    assert batches[0].length.tolist() == [3_200, 3_200, 0, 0, *[3_200] * 9]
    features, labels = batches[0]
    assert (features.dtype.is_floating_point, labels.tolist()) == (True, ["ab".index(key[0]) for key in keys[:13]])
    with AudioLoader(Mixture([(split, 1)]), batch_size=4, training=True, seconds=0.1) as loader:
        assert next(iter(loader)).sources.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": 601}, "at most 600"),
        ({"rate": 0}, "rate is 0"),
        ({"features": "mfcc"}, "wave, mel"),
        ({"mel": MelConfig()}, "features is 'wave'"),
        ({"augment": MASKS}, "features is 'wave'"),
        ({"on_bad": "skip"}, "raise, mask"),
        ({"features": "mel", "seconds": 0.01}, "fewer than half a window"),
    ],
)
def test_arguments_out_of_range_are_refused(split, options, reason):
    with pytest.raises(ConfigError, match=reason):
        AudioLoader(split, batch_size=1, training=True, **{"seconds": 1.0, **options})


@pytest.mark.parametrize("options", [{"gain_db": -1}, {"time_masks": 9}, {"freq_mask": -1}])
def test_random_changes_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="expected"):
        AudioAugment(**options)


def test_data_without_sounds_are_refused(repository, tmp_path):
    (tmp_path / "table.csv").write_text("key,label\na,1\n")
    ingest(repository, str(tmp_path / "table.csv"), "table")
    with pytest.raises(ConfigError, match="has no sounds"):
        AudioLoader(open_dataset(repository, "table")["train"], batch_size=1, training=True, seconds=1)
