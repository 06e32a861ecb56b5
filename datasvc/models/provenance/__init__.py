"""Compute the lineage of a model version, and find the versions that consumed a sample."""
