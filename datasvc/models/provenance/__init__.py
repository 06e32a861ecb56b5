"""Provenance: the lineage of a model version, and the versions that consumed a sample."""
