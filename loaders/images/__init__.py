"""`ImageLoader`: batches of decoded images."""
