"""Profiling of a loader's steps: time per stage, the bottleneck, and traces."""
