"""Reads objects from where they come from: the origin, by parallel ranged requests."""
