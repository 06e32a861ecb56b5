"""Predicts the duration of a training step on other clusters. Pure."""
