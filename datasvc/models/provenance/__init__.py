"""Where a version comes from, and which versions consumed a sample."""
