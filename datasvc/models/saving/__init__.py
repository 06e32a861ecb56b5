"""Saves checkpoints of a run as model versions: in the foreground or background, by one process or all ranks."""
