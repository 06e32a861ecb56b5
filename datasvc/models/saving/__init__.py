"""Saves checkpoints of a run: in the background, by all ranks together, at the right moments."""
