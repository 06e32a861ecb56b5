"""Fetches the shards of a job before its access order needs them."""
