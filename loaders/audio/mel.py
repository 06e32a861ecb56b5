"""Mel spectrograms in NumPy, equal to the last bit in every thread and batch.

A wave is reflected at both ends by half a window, so that frame t is centred at sample t * hop. Each frame is
multiplied by a periodic Hann window; its power spectrum |FFT|^2 is summed by triangular filters, whose corners are
equally spaced on the mel scale:

- "htk" (Young et al., "The HTK Book", 5.4): mel = 2595 log10(1 + hz / 700); triangles of height 1. These are the
  defaults of torchaudio.
- "slaney" (Slaney, "Auditory Toolbox", 1998): mel = 3 hz / 200 below 1000 Hz, 15 + 27 ln(hz / 1000) / ln 6.4 above;
  triangles of area 1 in Hz. These are the defaults of librosa.

With `log`, the result is ln(max(mel, 1e-10)).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.loaders.core.arguments import check_sizes

Floats = npt.NDArray[np.float64]
Scale = Literal["htk", "slaney"]
FLOOR: Final = 1e-10
"""Smallest power of which `log` is taken."""


@dataclass(frozen=True)
class MelConfig:
    """How mel spectrograms are computed.

    Attributes:
        num_mels: number of mel filters.
        window: samples of a frame, and of its FFT.
        hop: samples from one frame to the next.
        low_hz: lowest corner of the filters.
        high_hz: highest corner; None: half of the rate.
        scale: "htk" or "slaney"; the module has the formulas.
        log: whether the result is the natural logarithm of the power.

    Raises:
        ConfigError: a value is out of range.
    """

    num_mels: int = 64
    window: int = 400
    hop: int = 160
    low_hz: float = 0.0
    high_hz: float | None = None
    scale: Scale = "htk"
    log: bool = True

    def __post_init__(self) -> None:
        check_sizes(num_mels=self.num_mels, window=self.window, hop=self.hop)
        if self.scale not in get_args(Scale):
            raise ConfigError(f"scale is {self.scale!r}; expected one of {', '.join(get_args(Scale))}")
        if not 0 <= self.low_hz < (math.inf if self.high_hz is None else self.high_hz):
            raise ConfigError(f"low_hz is {self.low_hz} and high_hz {self.high_hz}; expected 0 <= low_hz < high_hz")

    def check_clip(self, rate: int, num_samples: int) -> None:
        """Raise ConfigError if clips of `num_samples` at `rate` are too short, or a filter has no FFT bin."""
        if num_samples <= self.window // 2:
            raise ConfigError(f"a clip has {num_samples} samples, fewer than half a window of {self.window}")
        if (self.high_hz or 0) > rate / 2:
            raise ConfigError(f"high_hz is {self.high_hz}; expected at most {rate / 2:g}, half of the rate")
        empty = np.flatnonzero(~mel_filters(self, rate).any(0))
        if len(empty):
            raise ConfigError(
                f"{len(empty)} of {self.num_mels} mel filters lie between two FFT bins, such as number {empty[0]}; "
                "give fewer num_mels or a longer window"
            )

    def count_frames(self, num_samples: int) -> int:
        """Return the number of frames of a wave; the middle of an odd window is a sample, which needs one more."""
        return 1 + (num_samples - self.window % 2) // self.hop


def mel_spectrogram(wave: npt.NDArray[np.float32], rate: int, config: MelConfig) -> npt.NDArray[np.float32]:
    """Return the mel spectrogram of a wave.

    Args:
        wave: `float32[channels, samples]`, more samples than half a window.
        rate: samples per second.
        config: settings.

    Returns:
        `float32[channels, num_mels, frames]`, with `count_frames(samples)` frames.
    """
    padded = np.pad(wave, ((0, 0), (config.window // 2,) * 2), mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, config.window, axis=1)[:, :: config.hop]
    spectrum = np.fft.rfft(frames * _hann(config.window), axis=2)
    power = spectrum.real**2 + spectrum.imag**2
    # Not a product of matrices: BLAS adds in an order that depends on its number of threads.
    mels = np.einsum("ctf,fm->cmt", power, mel_filters(config, rate))
    result: npt.NDArray[np.float32] = np.log(np.maximum(mels, FLOOR, dtype=np.float32)) if config.log else mels
    return result


@functools.lru_cache(8)
def mel_filters(config: MelConfig, rate: int) -> npt.NDArray[np.float32]:
    """Return the weight of each FFT bin in each mel filter, `float32[window // 2 + 1, num_mels]`."""
    high_hz = rate / 2 if config.high_hz is None else config.high_hz
    low, high = to_mel(np.array([config.low_hz, high_hz]), config.scale)
    corners = to_hz(np.linspace(low, high, config.num_mels + 2), config.scale)
    bins = np.arange(config.window // 2 + 1) * (rate / config.window)
    left, centre, right = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (bins[:, None] - left) / (centre - left), (right - bins[:, None]) / (right - centre)
    weights = np.maximum(0, np.minimum(rising, falling))
    if config.scale == "slaney":
        weights *= 2 / (right - left)
    return weights.astype(np.float32)


def to_mel(hz: Floats, scale: Scale) -> Floats:
    """Return frequencies in mel."""
    if scale == "htk":
        return 2595 * np.log10(1 + hz / 700)
    above = 15 + 27 * np.log(np.maximum(hz, 1000) / 1000) / np.log(6.4)
    return np.where(hz < 1000, 3 * hz / 200, above)


def to_hz(mel: Floats, scale: Scale) -> Floats:
    """Return the inverse of `to_mel`."""
    if scale == "htk":
        return 700 * (10 ** (mel / 2595) - 1)
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) * (mel - 15) / 27))


@functools.lru_cache(8)
def _hann(window: int) -> npt.NDArray[np.float32]:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32)
