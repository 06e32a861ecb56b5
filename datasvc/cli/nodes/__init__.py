"""Commands for caches and nodes."""
