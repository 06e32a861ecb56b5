"""Keyed permutations and counter-based random numbers: pure functions of a key and a position.

Access orders and augmentation use them. There is no generator state and no memory per sample, so any position of any
epoch can be computed directly, on any node, in any order. Keys come from numpy's `SeedSequence` over words of fixed
width, so that different triples of (seed, epoch, purpose) have different keys. If keys came from sums such as
`seed + epoch`, some triples would share a key.

Sources: the permutation is the generalised Feistel network of Black and Rogaway ("Ciphers with Arbitrary Finite
Domains", CT-RSA 2002) over a x b >= n values with cycle walking; the mixing constants are those of SplitMix64
(Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError

Keys = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

_ROUNDS: Final = 6
# Number of values computed at a time; small, so that all temporary arrays of a chunk stay in the level-2 cache.
_CHUNK: Final = 8192
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(shift) for shift in (27, 30, 31, 32))
_MAX_SIZE: Final = 1 << 62


def derive_keys(seed: int, epoch: int, purpose: int, count: int) -> Keys:
    """Return keys for one purpose in one epoch: `uint64[count]`.

    `purpose`, 0 <= purpose < 2**32, is a number that each use of keys defines, so that two uses never share keys.

    Raises:
        ConfigError: `seed` or `epoch` is negative, or not below 2**64.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < 1 << 64:
            raise ConfigError(f"{name} is {value}; expected 0 <= {name} < 2**64")
    # Use two words for each number: otherwise (seed 2**32, epoch 0) and (seed 0, epoch 1) would have the same words.
    words = [seed & 0xFFFFFFFF, seed >> 32, epoch & 0xFFFFFFFF, epoch >> 32, purpose]
    return np.asarray(np.random.SeedSequence(words).generate_state(count, np.uint64), np.uint64)


def uniform(key: np.uint64, counters: Integers, stream: int) -> npt.NDArray[np.float64]:
    """Return one random number in [0, 1) per counter, a pure function of (key, counter, stream).

    Args:
        key: key from `derive_keys`.
        counters: `int64[n]`, such as positions.
        stream: number that selects one of several random numbers of the same counter, 0 <= stream < 2**16.

    Returns:
        `float64[n]`, multiples of 2**-53.
    """
    numbers: npt.NDArray[np.float64] = uniforms(key, counters, 1, stream)[0]
    return numbers


def uniforms(key: np.uint64, counters: Integers, count: int, first: int = 0) -> npt.NDArray[np.float64]:
    """Return the numbers of `uniform` for `count` streams from `first` on, much faster than `count` calls.

    Returns:
        `float64[count, n]`.
    """
    with np.errstate(over="ignore"):
        state = _finalise(counters.astype(np.uint64) * _GOLDEN + key)
        streams = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * _GOLDEN
        bits = _finalise(state + streams[:, None])
    # Keep 53 bits, the precision of float64.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _finalise(state: Keys) -> Keys:
    """Mix the bits of each value, as the finaliser of SplitMix64 does."""
    state = (state ^ (state >> _S30)) * _MIX_1
    state = (state ^ (state >> _S27)) * _MIX_2
    return state ^ (state >> _S31)


class KeyedPermutation:
    """Permutations of range(size), computed per element without a table; 0 <= size <= 2**62.

    A tweak is an integer that selects one of many independent permutations of the same size, such as one per block.
    `keys`, `uint64[6]`, come from `derive_keys`.
    """

    num_keys: Final = _ROUNDS

    def __init__(self, size: int, keys: Sequence[np.uint64] | Keys) -> None:
        assert 0 <= size <= _MAX_SIZE, size
        assert len(keys) == _ROUNDS, len(keys)
        self.size = size
        self._keys = np.asarray(keys, np.uint64)
        # The Feistel network permutes range(a * b), where `b` is size / a, rounded up. With `a` close to the square
        # root of the size, a * b exceeds the size by less than `a`, so cycle walking is rarely needed.
        self._a = np.uint64(math.isqrt(max(size - 1, 0)) + 1)
        self._b = np.uint64(-(-size // int(self._a)) or 1)  # 1 for size 0

    def permute(self, values: Integers, tweaks: Integers | None = None) -> Integers:
        """Return the image of each value under the permutation.

        Args:
            values: `int64[n]` in range(size).
            tweaks: `int64[n]`, number of the permutation for each value; None: permutation 0 for all.

        Returns:
            `int64[n]` in range(size), a new array.
        """
        return self._map(values, tweaks, range(_ROUNDS), forward=True)

    def invert(self, values: Integers, tweaks: Integers | None = None) -> Integers:
        """Return the inverse of `permute`, with the same arguments."""
        return self._map(values, tweaks, range(_ROUNDS - 1, -1, -1), forward=False)

    def _map(self, values: Integers, tweaks: Integers | None, rounds: range, *, forward: bool) -> Integers:
        """Apply `rounds` to each value. For the inverse, they are in reverse order, and `forward` is False."""
        result = np.empty(len(values), np.int64)
        source = np.ascontiguousarray(values, np.int64).view(np.uint64)
        tweak_keys = None if tweaks is None else tweaks.astype(np.uint64) * _MIX_2
        with np.errstate(over="ignore"):
            for start in range(0, len(values), _CHUNK):
                chunk = slice(start, start + _CHUNK)
                tweak = None if tweak_keys is None else tweak_keys[chunk]
                result[chunk] = self._map_chunk(source[chunk], tweak, rounds, forward).view(np.int64)
        return result

    def _map_chunk(self, values: Keys, tweak: Keys | None, rounds: range, forward: bool) -> Keys:
        mapped = self._network(values, tweak, rounds, forward)
        outside = np.flatnonzero(mapped >= self.size)
        while outside.size:
            # Cycle walking: apply the network again to the values outside of range(size), until none is outside.
            outside_tweak = None if tweak is None else tweak[outside]
            mapped[outside] = self._network(mapped[outside], outside_tweak, rounds, forward)
            outside = outside[mapped[outside] >= self.size]
        return mapped

    def _network(self, values: Keys, tweak: Keys | None, rounds: range, forward: bool) -> Keys:
        """Permute values of range(a * b): each is split into high * a + low, and the rounds change the two halves."""
        high = values // self._a
        low = values - high * self._a
        scratch = np.empty_like(values)
        for number in rounds:
            if number % 2 == 0:
                self._round(low, high, self._a, number, tweak, scratch, forward)
            else:
                self._round(high, low, self._b, number, tweak, scratch, forward)
        high *= self._a
        high += low
        return high

    def _round(
        self,
        target: Keys,
        other: Keys,
        modulus: np.uint64,
        number: int,
        tweak: Keys | None,
        scratch: Keys,
        forward: bool,
    ) -> None:
        """Add a keyed hash of `other` to `target` in place, modulo `modulus`; subtract it unless `forward`."""
        np.multiply(other, _GOLDEN, out=scratch)
        scratch += self._keys[number]
        if tweak is not None:
            scratch += tweak
        hashed = scratch >> _S32
        scratch ^= hashed
        scratch *= _MIX_1
        np.right_shift(scratch, _S32, out=scratch)
        # Multiply and shift instead of dividing: the result is uniform except for a bias below modulus / 2**32.
        scratch *= modulus
        np.right_shift(scratch, _S32, out=scratch)
        if not forward:
            np.subtract(modulus, scratch, out=scratch)
        target += scratch
        # target < 2 * modulus now. A negative difference wraps to a large number, so the minimum is the remainder.
        np.subtract(target, modulus, out=hashed)
        np.minimum(target, hashed, out=target)
