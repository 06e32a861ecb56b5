"""The exact batch of a step of a run, from the entries of versions; and which of its samples changed a metric."""
