"""Reports of a run: events, progress, metrics for experiment trackers, durations of steps."""
