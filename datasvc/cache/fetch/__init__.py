"""Fetches one object into its incoming file, from peers or the origin, and verifies it."""
