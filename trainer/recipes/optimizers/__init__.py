"""Optimizers, learning-rate schedules, precision, and rounds with leases of the training program."""
