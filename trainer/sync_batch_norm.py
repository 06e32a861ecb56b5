"""The name of `horovod.torch.sync_batch_norm`."""

from __future__ import annotations

from datasvc.trainer.optim.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
