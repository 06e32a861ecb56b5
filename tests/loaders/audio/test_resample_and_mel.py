"""Resampling against SciPy, and mel spectrograms against a reference in loops of float64."""

import numpy as np
import pytest
from scipy.signal import resample_poly

from datasvc.errors import ConfigError
from datasvc.loaders import MelConfig
from datasvc.loaders.audio.mel import mel_spectrogram
from datasvc.loaders.audio.resample import reduce_rates, resample
from tests.support.sounds import noise


@pytest.mark.parametrize(
    ("source", "target"),
    [(44_100, 16_000), (16_000, 44_100), (48_000, 16_000), (8_000, 16_000), (11_025, 8_000), (7, 5)],
)
def test_resampling_is_that_of_scipy(source, target):
    wave = noise(3_001, 2).T
    up, down = reduce_rates(source, target)
    expected = resample_poly(wave.astype(np.float64), up, down, axis=1)
    whole = resample(wave, up, down, first=0, count=expected.shape[1])
    np.testing.assert_allclose(whole, expected, atol=2e-6)
    assert resample(wave, up, down, first=77, count=100).tobytes() == whole[:, 77:177].tobytes()


def test_resampling_to_the_same_rate_changes_nothing():
    wave = noise(100).T
    assert resample(wave, 1, 1, first=10, count=200).tolist() == [[*wave[0, 10:], *[0.0] * 110]]


def reference(wave, rate, config):
    """Return the mel spectrogram by the formulas of the module, bin by bin."""
    if config.scale == "htk":
        to_mel = lambda hz: 2595 * np.log10(1 + hz / 700)  # noqa: E731
        to_hz = lambda mel: 700 * (10 ** (mel / 2595) - 1)  # noqa: E731
    else:
        to_mel = lambda hz: 3 * hz / 200 if hz < 1000 else 15 + 27 * np.log(hz / 1000) / np.log(6.4)  # noqa: E731
        to_hz = lambda mel: 200 * mel / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)  # noqa: E731
    half = config.window // 2
    padded = np.concatenate([wave[half:0:-1], wave, wave[-2 : -half - 2 : -1]]).astype(np.float64)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(config.window) / config.window)
    low, high = to_mel(config.low_hz), to_mel(config.high_hz or rate / 2)
    corners = [to_hz(low + (high - low) * k / (config.num_mels + 1)) for k in range(config.num_mels + 2)]
    out = np.zeros((config.num_mels, config.count_frames(len(wave))))
    for frame in range(out.shape[1]):
        power = np.abs(np.fft.fft(padded[frame * config.hop :][: config.window] * hann)) ** 2
        for mel in range(config.num_mels):
            left, centre, right = corners[mel : mel + 3]
            for each in range(half + 1):
                hz = each * rate / config.window
                weight = max(0, min((hz - left) / (centre - left), (right - hz) / (right - centre)))
                out[mel, frame] += power[each] * weight * (2 / (right - left) if config.scale == "slaney" else 1)
    return np.log(np.maximum(out, 1e-10)) if config.log else out


@pytest.mark.parametrize(
    "config",
    [
        MelConfig(num_mels=20, window=256, hop=100),
        MelConfig(num_mels=20, window=256, hop=100, scale="slaney", log=False),
        MelConfig(num_mels=12, window=200, hop=80, low_hz=100, high_hz=3_000),
        MelConfig(num_mels=12, window=251, hop=100),
        MelConfig(num_mels=12, window=200, hop=80, low_hz=20, high_hz=3_800, scale="slaney"),
    ],
)
def test_a_mel_spectrogram_is_that_of_the_formulas(config):
    wave = noise(1_000)[:, 0] + np.sin(np.arange(1_000, dtype=np.float32) / 5)
    expected = reference(wave, 8_000, config)
    found = mel_spectrogram(wave[None], 8_000, config)
    assert (found.dtype, found.shape) == (np.float32, (1, *expected.shape))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_mels": 128, "window": 400}, "mel filters lie between two FFT bins"),
        ({"high_hz": 9_000}, "expected at most 8000, half of the rate"),
        ({"window": 5_000}, "fewer than half a window"),
    ],
)
def test_settings_that_do_not_fit_the_clip_are_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        MelConfig(**config).check_clip(16_000, 2_000)


@pytest.mark.parametrize("config", [{"scale": "bark"}, {"low_hz": 100, "high_hz": 50}, {"hop": 0}])
def test_settings_out_of_range_are_refused(config):
    with pytest.raises(ConfigError, match="expected"):
        MelConfig(**config)
