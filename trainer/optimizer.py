"""The names of `horovod.torch.optimizer`: the function, and the classes that programs test with `isinstance`."""

from __future__ import annotations

from datasvc.trainer.optim.adasum_optimizer import _DistributedAdasumOptimizer
from datasvc.trainer.optim.optimizer import DistributedOptimizer, _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
