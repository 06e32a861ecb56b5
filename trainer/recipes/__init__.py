"""The training program: a training loop that uses the loaders, `DistributedOptimizer` and checkpoints."""
