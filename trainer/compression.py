"""The names of `horovod.torch.compression`, from which programs derive compressors of their own."""

from __future__ import annotations

from datasvc.trainer.gradients.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
