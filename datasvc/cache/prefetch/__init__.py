"""Fetches the shards of a job ahead of its access order."""
