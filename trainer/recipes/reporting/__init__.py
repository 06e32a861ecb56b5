"""What a run reports: events, metrics, progress, traces."""
