"""Append-only logs of versions, tags and removals, and the journals of unfinished work."""
