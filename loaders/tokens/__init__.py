"""`TokenLoader`: batches of packed token blocks."""
