"""Predicts the time of a step on other clusters. Pure."""
