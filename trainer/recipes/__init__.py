"""The program of `datasvc train`: a training loop that uses the loaders, `DistributedOptimizer` and checkpoints."""
