"""Which operations all ranks have submitted, and in which order they run. Pure."""
