"""Parameter servers: they hold the weights, workers push gradients to them, and staleness may be bounded."""
