"""Commands about caches and nodes."""
