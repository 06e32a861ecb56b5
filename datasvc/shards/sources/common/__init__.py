"""What all source formats share: the `Source` interface, files, columns and splits."""
