"""Optimizers and modules that combine values over ranks: DistributedOptimizer, SyncBatchNorm, broadcast of state."""
