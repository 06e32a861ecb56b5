"""Reads headers of encoded images, checks that they decode, and encodes them again."""
