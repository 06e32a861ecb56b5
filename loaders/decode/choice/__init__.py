"""Choice of the decoding backend: by argument, by the saved state, or by a trial on the data."""
