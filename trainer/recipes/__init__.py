"""The training program: a training loop over the loaders, `DistributedOptimizer` and checkpoints."""
