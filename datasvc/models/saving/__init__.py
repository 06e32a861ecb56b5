"""Saves checkpoints of a run: in the background, on all ranks together, on a schedule."""
