"""Lists, compares, retains, removes, verifies and repairs model versions."""
