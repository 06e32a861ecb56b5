"""What tensors travel as: half as many bytes where 16 bits are good enough, or only what matters most of them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from datasvc.trainer.gradients.power_sgd import PowerSGD
from datasvc.trainer.gradients.top_k import TopK


class Compressor:
    """Base of compressors, also of a user's own; it leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What shall travel, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:  # noqa: ARG004 - compressors have one signature
        """What came, as the caller had it."""
        return tensor


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""


class _As16Bits(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Floating tensors as 16 bits; the context is the dtype they had."""
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, context: Any) -> Tensor:
        """In the dtype of old."""
        return tensor if context is None else tensor.to(context)


class FP16Compressor(_As16Bits):
    """Floating tensors travel as float16: values above 65,504 become infinite."""

    dtype = torch.float16


class BF16Compressor(_As16Bits):
    """Floating tensors travel as bfloat16: the range of float32 with 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The compressors, as Horovod's scripts name them; the last two are ours, and only for `DistributedOptimizer`."""

    none: Final = NoneCompressor
    fp16: Final = FP16Compressor
    bf16: Final = BF16Compressor
    topk: Final = TopK
    powersgd: Final = PowerSGD
