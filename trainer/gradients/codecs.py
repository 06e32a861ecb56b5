"""Codecs of gradients: blocks of numbers as integers of 1 to 8 bits and one or two scales per block.

A codec is a pair of functions on blocks. `pack` and `unpack` write what they give as bytes. Used by `quantized`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 512
"""Numbers that share a scale, as in QSGD's experiments: a scale of 4 bytes is 0.06 bits of a number."""

# Above zero, so that a block of zeros can be divided by it, and far below the numbers of gradients.
_SMALLEST_SCALE = 1e-30


@dataclass(frozen=True)
class Codec:
    """A codec of blocks.

    Attributes:
        bits: bits of a number: 1, 2, 4 or 8.
        num_scales: float32 scales of a block.
        encode: returns integers uint8[blocks, BLOCK] and scales float32[blocks, num_scales] for values
            float32[blocks, BLOCK] and random numbers in [0, 1) of the same shape.
        decode: returns values float32[blocks, BLOCK] for integers and scales.
        is_random: whether rounding is random, so that the mean over all random numbers is the value itself. The error
            is then not kept for the next step; that of another codec is (error feedback).
    """

    bits: int
    num_scales: int
    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]
    is_random: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on the wire."""
        return BLOCK * self.bits // 8 + 4 * self.num_scales

    def pack(self, values: Tensor, random: Tensor) -> Tensor:
        """Return blocks as bytes: uint8[blocks, block_bytes] for values float32[blocks, BLOCK]."""
        integers, scales = self.encode(values, random)
        per_byte = 8 // self.bits
        shifts = torch.arange(per_byte, dtype=torch.uint8, device=values.device) * self.bits
        # No carry: the integers of a byte have bits of their own.
        packed = (integers.view(len(values), -1, per_byte) << shifts).sum(2, dtype=torch.uint8)
        return torch.cat([packed, scales.contiguous().view(torch.uint8).view(len(values), -1)], dim=1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the values of blocks: float32[blocks, BLOCK] for uint8[blocks, block_bytes]."""
        num_bytes = BLOCK * self.bits // 8
        shifts = torch.arange(8 // self.bits, dtype=torch.uint8, device=packed.device) * self.bits
        integers = (packed[:, :num_bytes].unsqueeze(2) >> shifts) & (2**self.bits - 1)
        scales = packed[:, num_bytes:].contiguous().view(torch.float32)
        values: Tensor = self.decode(integers.view(len(packed), BLOCK), scales)
        return values


def _nearest(largest: int) -> Codec:
    """Integers from -largest to largest, rounded to the nearest; the scale is the block's largest magnitude."""

    def encode(values: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        scales = values.abs().amax(1, keepdim=True).clamp_min(_SMALLEST_SCALE) / largest
        return (torch.round(values / scales) + largest).to(torch.uint8), scales

    return Codec(_bits_of(largest), 1, encode, lambda integers, scales: (integers.float() - largest) * scales)


def _random(largest: int, norm: Callable[[Tensor], Tensor]) -> Codec:
    """Integers from -largest to largest, rounded to a neighbour at random; the scale is a norm of the block."""

    def encode(values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
        scales: Tensor = norm(values).clamp_min(_SMALLEST_SCALE) / largest
        integers = torch.floor(values / scales + random).clamp_(-largest, largest)
        return (integers + largest).to(torch.uint8), scales

    return dataclasses.replace(_nearest(largest), encode=encode, is_random=True)


def _bits_of(largest: int) -> int:
    """Return the bits of an integer from -largest to largest, rounded up to a divisor of 8."""
    return next(bits for bits in (2, 4, 8) if 2 * largest < 2**bits)


def _largest_of(values: Tensor) -> Tensor:
    return values.abs().amax(1, keepdim=True)


def _euclidean(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return norms


def _encode_signs(values: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of each number; the scales are the means of the numbers below zero and of the others."""
    is_above = values >= 0
    num_above = is_above.sum(1)
    above = torch.where(is_above, values, 0).sum(1) / num_above.clamp_min(1)
    below = torch.where(is_above, 0, values).sum(1) / (BLOCK - num_above).clamp_min(1)
    return is_above.to(torch.uint8), torch.stack([below, above], dim=1)


def _decode_signs(integers: Tensor, scales: Tensor) -> Tensor:
    return torch.where(integers.bool(), scales[:, 1:], scales[:, :1])


def _encode_votes(values: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    # 3 for a number that is not finite, which must not become a vote.
    return torch.where(values.isfinite(), torch.sign(values) + 1, 3).to(torch.uint8), values[:, :0]


def _decode_votes(integers: Tensor, _: Tensor) -> Tensor:
    return torch.where(integers == 3, torch.nan, integers.float() - 1)


INT8 = _nearest(127)
INT4 = _nearest(7)
TERNARY = _random(1, _largest_of)
"""TernGrad (Wen et al. 2017), without its clipping of large gradients."""
ONE_BIT = Codec(1, 2, _encode_signs, _decode_signs)
"""1-bit SGD (Seide et al. 2014)."""
VOTES = Codec(2, 0, _encode_votes, _decode_votes)
"""signSGD (Bernstein et al. 2018): -1, 0 or 1; 0 for a gradient of zero, and for a vote that is tied."""


def qsgd(levels: int) -> Codec:
    """Return the codec of QSGD (Alistarh et al. 2017) with 1 to 127 levels, and blocks as its buckets."""
    return _random(levels, _euclidean)
