"""Optimizers, learning-rate schedules and precision of the training program."""
