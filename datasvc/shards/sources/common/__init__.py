"""Base of all source formats: the `Source` interface, files, columns and splits."""
