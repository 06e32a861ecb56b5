"""Resampling by a rational factor with a polyphase filter, as `scipy.signal.resample_poly` does by default.

The filter is a windowed sinc (Oppenheim and Schafer, "Discrete-Time Signal Processing", 4.6): cut-off at the lower
of the two Nyquist frequencies, 10 zero crossings on each side, Kaiser window with beta 5. Only the outputs that are
asked for are computed. Each is one dot product, so it does not depend on the others or on the number of threads.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np
import numpy.typing as npt

Wave = npt.NDArray[np.float32]

_CROSSINGS: Final = 10
_BETA: Final = 5.0
_CHUNK: Final = 1 << 20  # products computed at a time, which bounds the memory


def reduce_rates(source: int, target: int) -> tuple[int, int]:
    """Return `up` and `down` of the factor target / source in lowest terms."""
    common = math.gcd(source, target)
    return target // common, source // common


def reach(up: int, down: int) -> int:
    """Return how many inputs before and after its own time an output depends on."""
    return 0 if up == down else _CROSSINGS * max(up, down) // up + 1


def resample(wave: Wave, up: int, down: int, *, first: int, count: int) -> Wave:
    """Return outputs [first, first + count) of a wave that is zero before its start and after its end.

    Args:
        wave: `float32[channels, n]`.
        up: first result of `reduce_rates`.
        down: the second one; output m has the time of input m * down / up.
        first: first output.
        count: number of outputs.

    Returns:
        `float32[channels, count]`.
    """
    if up == down:
        out = np.zeros((len(wave), count), np.float32)
        part = wave[:, first : first + count]
        out[:, : part.shape[1]] = part
        return out
    bank = _filters(up, down)
    taps = bank.shape[1]
    times = (first + np.arange(count)) * down
    nearest, phases = times // up, times % up
    # Row i of `windows` has the inputs that an output at the time of input i depends on.
    before = taps // 2 - 1
    after = max(0, int(nearest[-1]) + taps - before - wave.shape[1]) if count else taps
    padded = np.pad(wave, ((0, 0), (before, after)))
    out = np.empty((len(wave), count), np.float32)
    rows = max(1, _CHUNK // taps)
    for channel, samples in enumerate(padded):
        windows = np.lib.stride_tricks.sliding_window_view(samples, taps)
        for start in range(0, count, rows):
            chunk = slice(start, start + rows)
            np.einsum("ij,ij->i", windows[nearest[chunk]], bank[phases[chunk]], out=out[channel, chunk])
    return out


@functools.lru_cache(8)
def _filters(up: int, down: int) -> Wave:
    """Return the coefficients of each phase, `float32[up, taps]`: column j is for the input `j - taps / 2 + 1` on."""
    lower = max(up, down)
    half = _CROSSINGS * lower
    offsets = np.arange(-half, half + 1)
    low_pass = np.sinc(offsets / lower) * np.kaiser(2 * half + 1, _BETA)
    low_pass *= up / low_pass.sum()
    side = reach(up, down)
    taps = 2 * side + 2
    # Coefficient of input i for an output at i0 + phase / up: number half + phase + (i0 - i) * up.
    numbers = half + np.arange(up)[:, None] - (np.arange(taps) - side) * up
    inside = (numbers >= 0) & (numbers <= 2 * half)
    return np.where(inside, low_pass[np.clip(numbers, 0, 2 * half)], 0).astype(np.float32)
