"""Compressors of tensors for communication: no compression, 16-bit types, and access to top-k and PowerSGD.

They are values of the argument `compression` of `DistributedOptimizer` and of the operations.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from datasvc.trainer.gradients.power_sgd import PowerSGD
from datasvc.trainer.gradients.top_k import TopK


class Compressor:
    """Base class of all compressors, including a user's own: a subclass, or an instance of one that has settings.

    The methods of this class return tensors unchanged.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:  # noqa: ARG004 - subclasses use it
        """Return a received tensor, decompressed. `context` is the value that `compress` returned on this rank."""
        return tensor


class NoneCompressor(Compressor):
    """No compression."""


class _As16Bits(Compressor):
    """Conversion of floating-point tensors to the 16-bit type `dtype`; other tensors are sent unchanged."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Convert a floating-point tensor to 16 bits; the context is its original dtype."""
        if not tensor.dtype.is_floating_point:
            return tensor, None  # integers would lose digits
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, context: Any) -> Tensor:
        """Convert a tensor back to its original dtype."""
        return tensor if context is None else tensor.to(context)


class FP16Compressor(_As16Bits):
    """Compression of floating-point tensors to float16: values above 65,504 become infinite."""

    dtype = torch.float16


class BF16Compressor(_As16Bits):
    """Compression of floating-point tensors to bfloat16: the range of float32 with 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The compressors under Horovod's names; `topk` and `powersgd` are additions, for `DistributedOptimizer` only."""

    none: Final = NoneCompressor
    fp16: Final = FP16Compressor
    bf16: Final = BF16Compressor
    topk: Final = TopK
    powersgd: Final = PowerSGD
