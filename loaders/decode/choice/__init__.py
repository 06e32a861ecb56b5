"""Chooses the decoding backend: by request, by the saved state, or by a trial on the data."""
