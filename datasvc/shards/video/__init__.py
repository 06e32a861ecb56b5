"""Encoded videos: their columns, the index of their frames, and decoding of chosen frames."""
