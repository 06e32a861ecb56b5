"""Optimizers, batch normalization and initial state that are shared by all ranks of a job."""
