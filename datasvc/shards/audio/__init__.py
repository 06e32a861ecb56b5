"""Encoded sounds: header, check of a whole file, and decoding of a part."""
