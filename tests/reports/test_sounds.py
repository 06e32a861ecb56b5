"""Sounds: lengths, rates, channels, spectrograms and files that do not decode."""

import numpy as np
import pytest
from scipy.signal import resample_poly

from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import AudioAugment, AudioLoader, MelConfig
from datasvc.loaders.audio.mel import mel_filters, to_hz, to_mel
from datasvc.repository import Repository
from tests.support.sounds import decode, encode, ingest_files, noise, wav_header


@pytest.fixture
def repository(tmp_path):
    return Repository.create(str(tmp_path / "repo"))


def only_batch(split, **options):
    with AudioLoader(split, **{"batch_size": len(split), "training": False, "seconds": 0.5, **options}) as loader:
        (batch,) = loader.numpy()
    return batch


def test_each_file_is_resampled_from_its_own_rate(repository, tmp_path):
    """huggingface/datasets#3662: the first file's rate was kept for all others, whatever they had."""
    rates = [32_000, 16_000, 44_100, 8_000]
    files = {f"{number}.wav": encode(noise(rate // 2), rate) for number, rate in enumerate(rates)}
    batch = only_batch(ingest_files(repository, tmp_path, files), rate=48_000)
    for number, rate in enumerate(rates):
        common = np.gcd(rate, 48_000)
        expected = resample_poly(decode(files[f"{number}.wav"])[:, 0], 48_000 // common, rate // common)
        np.testing.assert_allclose(batch.features[number, 0], expected[:24_000], atol=3e-6)


def test_stereo_stays_stereo_if_asked_and_is_mixed_before_it_is_resampled(repository, tmp_path):
    """huggingface/datasets#8005, Blaizzy/mlx-vlm#2258: stereo became mono, or the axis of channels was resampled."""
    content = encode(noise(24_000, 2), 48_000)
    split = ingest_files(repository, tmp_path, {"a.wav": content})
    stereo, mono = only_batch(split, channels=2).features, only_batch(split).features
    assert (stereo.shape, mono.shape) == ((1, 2, 8_000), (1, 1, 8_000))
    assert np.abs(stereo[0, 0] - stereo[0, 1]).max() > 0.1
    np.testing.assert_allclose(mono[0, 0], stereo[0].mean(0), atol=1e-6)


def test_a_clip_from_the_middle_of_an_mp3_has_the_samples_of_the_file(repository, tmp_path):
    """bastibe/python-soundfile#402: a part of an MP3 begins with other samples, and a message on the terminal."""
    seconds = np.arange(22_050 * 20) / 22_050
    tones = np.sin(6.28 * 1_000 * seconds) * np.repeat(np.random.default_rng(0).uniform(0, 0.3, 20), 22_050)
    content = encode(tones + 0.02 * np.random.default_rng(1).standard_normal(len(tones)), 22_050, "mp3")
    whole = decode(content)[:, 0]
    split = ingest_files(repository, tmp_path, {"a.mp3": content})
    for seed in range(20):
        batch = only_batch(split, training=True, rate=22_050, seed=seed)
        clip = batch.features[0, 0]
        starts = np.flatnonzero(np.abs(whole - clip[0]) < 1e-6)
        assert any(np.abs(whole[start : start + len(clip)] - clip).max() < 1e-6 for start in starts[: 20 * 22_050])


@pytest.mark.parametrize("announced", [2_000_000, 0])
def test_a_header_with_another_length_than_the_data_is_refused(repository, tmp_path, announced):
    """librosa/librosa#876, pytorch/audio#3762, island-io/mila#151: shorter waves than announced, or none at all."""
    files = {"good.wav": encode(noise(8_000)), "long.wav": wav_header(announced) + bytes(20_000)}
    with pytest.raises(BadSampleError, match=r"long\.wav.*(truncated|no frames)"):
        ingest_files(repository, tmp_path, files)


def test_the_error_of_a_file_names_it(repository, tmp_path):
    """pytorch/audio#3810, pytorch/audio#65: a training ends, and which file it was is unknown; or a crash."""
    broken = noise(8_000)
    broken[100] = np.inf
    files = {
        "near/a.wav": encode(noise(8_000)),
        "far/away.wav": encode(broken, subtype="FLOAT"),
        "far/empty.mp3": b"",
    }
    with pytest.raises(BadSampleError, match=r"empty\.mp3.*empty file"):
        ingest_files(repository, tmp_path, files)
    split = ingest_files(repository, tmp_path, files, on_bad="skip")
    with pytest.raises(BadSampleError, match=r"'far/away\.wav'"):
        only_batch(split)


def test_a_mel_filter_without_a_bin_is_refused():
    """pytorch/audio#851, librosa/librosa#478: rows of zeros, or a warning, from more mels than an FFT has bins."""
    with pytest.raises(ConfigError, match=r"lie between two FFT bins.*fewer num_mels or a longer window"):
        MelConfig(num_mels=128, window=400).check_clip(16_000, 16_000)


@pytest.mark.parametrize("scale", ["htk", "slaney"])
def test_mel_filters_end_at_the_highest_frequency(scale):
    """pytorch/audio#292: filters reached half of the rate, whatever f_max was."""
    weights = mel_filters(MelConfig(num_mels=128, window=2_048, high_hz=8_000, scale=scale), 22_050)
    hz = np.arange(1_025) * 22_050 / 2_048
    assert not weights[hz >= 8_000].any()
    assert weights[(hz > 7_900) & (hz < 8_000)].any()
    assert to_hz(to_mel(hz, scale), scale) == pytest.approx(hz)


def test_masks_are_not_in_the_padding(repository, tmp_path):
    """speechbrain/speechbrain#1116, lhotse-speech/lhotse#648: time masks fell into the padding of short clips."""
    split = ingest_files(repository, tmp_path, {f"{n}.wav": encode(noise(1_600, seed=n)) for n in range(30)})
    settings = {"features": "mel", "training": True, "shuffle": None, "seconds": 2}
    plain = only_batch(split, **settings)
    masked = only_batch(split, **settings, augment=AudioAugment(time_masks=1, time_mask=5, freq_masks=1))
    changed = (plain.features != masked.features).any((1, 2))
    assert not changed[:, 11:].any()
    assert changed[:, :11].any(1).mean() > 0.6  # of masks whose size is not 0


def test_a_clip_longer_than_the_file_is_padded_and_silence_is_finite(repository, tmp_path):
    """auspicious3000/SpeechSplit#72, SeanNaren/deepspeech.pytorch#272: `high <= 0`, and NaN for files of zeros."""
    split = ingest_files(repository, tmp_path, {"a.wav": encode(noise(1)), "b.wav": encode(np.zeros(16_000))})
    for training in (False, True):
        batch = only_batch(split, training=training, features="mel", seconds=1)
        assert np.isfinite(batch.features).all()
        assert sorted(batch.length) == [1, 101]
