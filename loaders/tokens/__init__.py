"""`TokenLoader`, which serves batches of packed token blocks, and its parts."""
