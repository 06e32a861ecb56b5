"""Immutable objects, named by the BLAKE3 digest of their bytes."""
