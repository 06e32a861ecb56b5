"""Decides what a node's cache holds: the LMDB catalogue, its files and locks, budget, quotas and eviction."""
