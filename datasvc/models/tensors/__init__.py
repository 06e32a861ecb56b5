"""Stores tensors of model versions as objects: splits them into chunks, encodes these, and lists them in a table."""
