"""Measures where the time of a loader's steps goes, and names the bottleneck."""
