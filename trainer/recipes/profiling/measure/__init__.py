"""Measures the costs of the parts of a training step, by running steps."""
