"""Which part of each sound is a sample, and its random changes, as pure functions of (seed, epoch, position).

The frames of each file are a column of the data set, so clips are drawn before anything is decoded. A resumed run
draws the same values as an uninterrupted one, at any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers, derive_keys, uniforms

# Purpose of the keys (`derive_keys`); see `augment.py` for those of images.
_CLIPS: Final = 48
# Streams of a position; they must never change, because a resumed run draws the same values again.
_START, _GAIN, _MASKS = 0, 1, 2
_MAX_MASKS: Final = 8  # of each axis; each has two streams: its size and its start

Wave = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AudioAugment:
    """Random changes of clips in training, beside the place of the clip in its file.

    Masks are those of SpecAugment (Park et al. 2019, arXiv:1904.08779), for mel spectrograms only: the size of a mask
    is uniform from 0 to the given maximum, and it has the mean of the spectrogram.

    Attributes:
        gain_db: the loudness changes by a value from [-gain_db, gain_db], in dB.
        time_masks, freq_masks: number of masks over frames and over mels, at most 8.
        time_mask, freq_mask: maximum frames or mels of a mask.

    Raises:
        ConfigError: a value is out of range.
    """

    gain_db: float = 0.0
    time_masks: int = 0
    time_mask: int = 20
    freq_masks: int = 0
    freq_mask: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.gain_db <= 120:
            raise ConfigError(f"gain_db is {self.gain_db}; expected 0 to 120")
        for name, largest in (("time_masks", _MAX_MASKS), ("freq_masks", _MAX_MASKS), ("time_mask", None)):
            value = getattr(self, name)
            if value < 0 or (largest is not None and value > largest):
                raise ConfigError(f"{name} is {value}; expected 0 to {largest or 'the frames of a clip'}")
        if self.freq_mask < 0:
            raise ConfigError(f"freq_mask is {self.freq_mask}; expected 0 or more")

    @property
    def has_masks(self) -> bool:
        """Whether spectrograms are masked."""
        return self.time_masks + self.freq_masks > 0


@dataclass(frozen=True)
class Clips:
    """The clips of a batch.

    Attributes:
        starts: `int64[batch]`, first frame of each clip in its file.
        gains: `float32[batch]`, factor of the samples.
        masks: `float64[2 * _MAX_MASKS, 2, batch]`, numbers from [0, 1) for size and start of the masks; those of time
            first.
    """

    starts: Integers
    gains: npt.NDArray[np.float32]
    masks: npt.NDArray[np.float64]


def plan_clips(
    frames: npt.NDArray[Any],
    rates: npt.NDArray[Any],
    positions: Integers,
    *,
    seconds: float,
    seed: int,
    epoch: int,
    augment: AudioAugment | None,
) -> Clips:
    """Return the clip of each sample: at a random place, or in the middle. A short file starts at its first frame.

    Args:
        frames: frames of the files, `int[batch]`.
        rates: frames per second of the files, `int[batch]`.
        positions: positions of the samples in the epoch, `int64[batch]`.
        seconds: length of a clip.
        seed: seed of the access order.
        epoch: epoch of the access order.
        augment: random changes; None: an evaluation, which has none.
    """
    free = np.maximum(frames - np.ceil(seconds * rates.astype(np.float64)), 0).astype(np.int64)
    drawn = uniforms(derive_keys(seed, epoch, _CLIPS, 1)[0], positions, _MASKS + 4 * _MAX_MASKS)
    masks = drawn[_MASKS:].reshape(2 * _MAX_MASKS, 2, len(positions))
    if augment is None:
        return Clips(free // 2, np.ones(len(positions), np.float32), masks)
    starts = (drawn[_START] * (free + 1)).astype(np.int64)
    gains = 10 ** ((2 * drawn[_GAIN] - 1) * augment.gain_db / 20)
    return Clips(starts, gains.astype(np.float32), masks)


def mask_spectrogram(mels: Wave, length: int, drawn: npt.NDArray[np.float64], augment: AudioAugment) -> None:
    """Mask a spectrogram in place.

    Args:
        mels: `float32[channels, mels, frames]`.
        length: frames that are not padding; masks and mean are of these.
        drawn: numbers of one sample in `Clips.masks`, `float64[2 * _MAX_MASKS, 2]`.
        augment: number and sizes of the masks.
    """
    spoken = mels[:, :, :length]
    mean = spoken.mean()
    for first, count, largest, axis in (
        (0, augment.time_masks, augment.time_mask, 2),
        (_MAX_MASKS, augment.freq_masks, augment.freq_mask, 1),
    ):
        for size, start in drawn[first : first + count]:
            extent = spoken.shape[axis]
            width = int(size * (min(largest, extent) + 1))
            begin = int(start * (extent - width + 1))
            spoken[(slice(None),) * axis + (slice(begin, begin + width),)] = mean
