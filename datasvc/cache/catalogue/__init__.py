"""The catalogue of a node's cache: its LMDB database, files, locks, pins, budget, quotas and eviction policy."""
