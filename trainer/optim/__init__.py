"""Optimizers and batch normalization over all ranks of a job, and the broadcast of the initial state."""
