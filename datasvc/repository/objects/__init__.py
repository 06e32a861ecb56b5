"""Immutable objects, each named by the BLAKE3 digest of its bytes."""
