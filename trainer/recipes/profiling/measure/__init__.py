"""Measures the parts of a training step."""
