"""Stores tensors as objects: chunks, byte planes, differences, and the table that lists them."""
